"""Compute the expected cost of a failure and the effective training time by the formulas of DEADPOOL, section IV.

Protection is either a checkpoint every K steps, followed by a restart after a failure, or hot-swap: each step is
protected by snapshots in peers' memory, and a standby (a warm, idle node) takes over from a failed node. C is a cost in
seconds; R is the number of steps completed since the last checkpoint; phi is the share of the interrupted step that was
already computed; t_step is the time of a step; MTTF is the mean time to failure; eta is the effective training time.

    E[C_ckpt]    = C_overhead + E[T_restart] + t_step E[R]
    E[C_hotswap] = C_overhead + E[T_hotswap] + t_step E[phi]
    E[C_rate]    = lambda E[C],  lambda = 1 / MTTF
    eta          = MTTF / (MTTF + E[C])

C_overhead is the cost of protection between two failures. MTTF seconds of progress lie between two failures, and
therefore MTTF / (K t_step) checkpoints, or MTTF / t_step protected steps.

DEADPOOL counts phi, the lost part of the interrupted step, for hot-swap only. A restart loses this part as well, so
here it counts for both. With E[phi] = 1/2, the term t_step (E[R] + E[phi]) equals K/2 t_step, with which DEADPOOL
calculates; with E[phi] = 0 it equals the formula above.

Failures during a recovery are neglected, as in DEADPOOL. The model is therefore valid if E[C] is well below MTTF.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ft.lab.plan.disruption.replay import Replay

DAY_S = 86400.0


@dataclass(frozen=True)
class Cluster:
    """The cluster, and how often it fails.

    Attributes:
        gpus: number of GPUs that train.
        gpus_per_node: number of GPUs of one node.
        mttf_s: seconds of progress between two failures of the run.
        standby_nodes: number of standby nodes.
        repair_s: seconds until a failed node is available again as a standby.
    """

    gpus: int
    gpus_per_node: int
    mttf_s: float
    standby_nodes: int = 1
    repair_s: float = 0.0

    @property
    def nodes(self) -> int:
        return self.gpus // self.gpus_per_node

    @property
    def in_repair(self) -> float:
        """Return the mean number of nodes in repair: the failures during the time of one repair."""
        return self.repair_s / self.mttf_s

    @property
    def no_standby(self) -> float:
        """Return the probability that no standby is available when a failure strikes."""
        return missing(self.standby_nodes, self.in_repair)


@dataclass(frozen=True)
class Training:
    """Parameters of the training run that apply to restarts and to hot-swap.

    Attributes:
        step_s: seconds of a step.
        interval: steps between two checkpoints.
        checkpoint_s: seconds for which one checkpoint stops training.
        restart_s: seconds from a failure to the first step after a restart, without replay.
        interrupted: E[phi], the expected share of the interrupted step that was already computed (0 to 1).
    """

    step_s: float
    interval: int
    checkpoint_s: float
    restart_s: float
    interrupted: float = 0.5


@dataclass(frozen=True)
class HotSwap:
    """Durations of a hot-swap.

    Attributes:
        parts: name of a part of the recovery -> seconds, in order. The part "detect" is also spent if it turns out that
            no standby is available.
        protect_s: seconds by which snapshots prolong each step.
    """

    parts: Mapping[str, float]
    protect_s: float = 0.0


@dataclass(frozen=True)
class Cost:
    """Expected seconds per failure.

    Attributes:
        overhead: seconds of protection (checkpoints or snapshots) between two failures.
        latency: name of a part of the recovery -> its seconds, during which nothing is computed.
        replay: seconds of the steps that are computed again.
    """

    overhead: float
    latency: dict[str, float]
    replay: float

    @property
    def recovery(self) -> float:
        """Return the seconds that the failure itself causes, without the overhead."""
        return sum(self.latency.values()) + self.replay

    @property
    def total(self) -> float:
        """Return E[C] in seconds."""
        return self.overhead + self.recovery

    def per_day(self, mttf_s: float) -> float:
        """Return E[C_rate] for a day of progress, in seconds."""
        return self.total * DAY_S / mttf_s

    def efficiency(self, mttf_s: float) -> float:
        """Return eta: the share of the time (0 to 1) that advances the training."""
        return mttf_s / (mttf_s + self.total)


def mttf(gpus: int, gpus_per_node: int, mtbf_gpu_s: float | None, mtbf_node_s: float | None) -> float:
    """Return the mean seconds between two failures of a run. The failure rates of GPUs and nodes add up.

    Args:
        gpus: number of GPUs.
        gpus_per_node: number of GPUs of one node.
        mtbf_gpu_s: mean seconds between two failures of one GPU; None: GPUs do not fail.
        mtbf_node_s: mean seconds between two failures of one node; None: nodes do not fail.
    """
    rate = (gpus / mtbf_gpu_s if mtbf_gpu_s else 0.0) + (gpus / gpus_per_node / mtbf_node_s if mtbf_node_s else 0.0)
    return 1.0 / rate


def of_restart(cluster: Cluster, training: Training, replay: Replay) -> Cost:
    """Return E[C_ckpt], the expected cost of a failure for a run that restarts from a checkpoint."""
    return Cost(
        overhead=_checkpoints(cluster, training),
        latency={"restart": training.restart_s},
        replay=_replayed(training, replay),
    )


def of_hot_swap(cluster: Cluster, training: Training, replay: Replay, swap: HotSwap) -> Cost:
    """Return E[C_hotswap], the expected cost of a failure for a run with hot-swap.

    If no standby is left, the run restarts from a checkpoint. Therefore a run with hot-swap also writes the checkpoints
    of ``training``. With ``training.interval`` 0 there are none, and a standby must always be left.
    """
    alone = cluster.no_standby
    overhead = swap.protect_s * cluster.mttf_s / training.step_s
    lost = training.interrupted * training.step_s
    if training.interval:
        overhead += _checkpoints(cluster, training)
        lost = (1 - alone) * lost + alone * _replayed(training, replay)
    latency = {name: s if name == "detect" else (1 - alone) * s for name, s in swap.parts.items()}
    if alone:
        latency["restart"] = alone * training.restart_s
    return Cost(overhead, latency, lost)


def missing(standby_nodes: int, in_repair: float) -> float:
    """Return the probability that no standby is left when a failure strikes.

    The number of nodes in repair has a Poisson distribution with mean ``in_repair``, because failures are memoryless
    and repairs are independent (an M/G/infinity queue). Failures as Poisson arrivals see this same distribution.
    """
    if standby_nodes == 0:
        return 1.0
    if in_repair == 0:
        return 0.0
    log = math.log(in_repair)
    there = math.fsum(math.exp(i * log - in_repair - math.lgamma(i + 1)) for i in range(standby_nodes))
    return min(1.0, max(0.0, 1.0 - there))


def standbys_for(probability: float, in_repair: float) -> int:
    """Return the least number of standby nodes for which ``missing`` is at most ``probability``."""
    if in_repair == 0:
        return 1
    needed, there, log = 0, 0.0, math.log(in_repair)
    while 1.0 - there > probability:
        there += math.exp(needed * log - in_repair - math.lgamma(needed + 1))
        needed += 1
    return max(1, needed)


def _checkpoints(cluster: Cluster, training: Training) -> float:
    return training.checkpoint_s * cluster.mttf_s / (training.interval * training.step_s)


def _replayed(training: Training, replay: Replay) -> float:
    return training.step_s * (replay.expected(training.interval) + training.interrupted)
