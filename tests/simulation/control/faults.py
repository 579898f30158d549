"""Fault injection: the kinds of faults, their probabilities, and their schedule in a run.

The functions that inject the faults are in ``strikes``. A simulated run is called a history. An epoch is a version of
the map from logical ranks to workers, which the control plane closes after a failure.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.job.control.state import ENDED, RUNNING
from tests.simulation.control import strikes
from tests.simulation.control.restart_oracle import ANYTHING, HOT_SWAP, IN_PLACE, NOTHING

if TYPE_CHECKING:
    from tests.simulation.control.cluster import Cluster


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: name for ``--kinds`` and the report.
        weight: relative frequency.
        strike: function that injects the fault into a cluster and returns a description of the target, or "" if the
            cluster has no target for it.
        may_end_control: whether the fault may end the control plane's process, so that a journal is needed.
        at_worst: the strongest reaction of the control plane that is allowed if this is the only fault of the run and
            strikes during training.
        noticed_s: virtual seconds within which the epoch must then be closed, if it is closed.
    """

    name: str
    weight: float
    strike: "Callable[[Cluster], str]"
    may_end_control: bool = False
    at_worst: str = ANYTHING
    noticed_s: float = 1e9


# The docstrings in ``strikes`` describe the effect of each kind.
KINDS = (
    Kind("kill", 10, strikes.on_worker(strikes.kill, early=True), at_worst=HOT_SWAP, noticed_s=0.5),
    Kind("kill two at once", 3, strikes.kill_two),
    Kind("kill a rank and its copy", 2, strikes.kill_copies),
    Kind("exit with code 1", 1, strikes.on_worker(strikes.exits(1), early=True)),
    Kind("exit with code 0", 1, strikes.on_worker(strikes.exits(0), early=True), at_worst=HOT_SWAP, noticed_s=6.0),
    Kind("stop", 3, strikes.on_worker(strikes.stop), at_worst=HOT_SWAP, noticed_s=1.0),
    Kind("pause", 4, strikes.on_worker(strikes.pause, early=True), at_worst=HOT_SWAP, noticed_s=1.0),
    Kind("hang without heartbeat", 2, strikes.on_worker(strikes.fall_deaf), at_worst=HOT_SWAP, noticed_s=11.0),
    Kind("hang with heartbeat", 3, strikes.on_worker(strikes.spin), at_worst=HOT_SWAP, noticed_s=14.0),
    Kind("straggle", 2, strikes.on_worker(strikes.straggle), at_worst=HOT_SWAP, noticed_s=14.0),
    Kind(
        "raise recoverable error",
        3,
        strikes.on_training(strikes.raises("RecoverableError")),
        at_worst=IN_PLACE,
        noticed_s=2.0,
    ),
    Kind(
        "raise replace-node error",
        2,
        strikes.on_training(strikes.raises("ReplaceNodeError")),
        at_worst=HOT_SWAP,
        noticed_s=2.0,
    ),
    Kind("raise software error", 0.7, strikes.on_training(strikes.raises("ValueError"))),
    Kind("raise recoverable errors for ever", 1, strikes.on_training(strikes.ail)),
    Kind("a step that kills its worker", 0.7, strikes.on_training(strikes.poison("kill"))),
    Kind("a step that is a software error", 0.7, strikes.on_training(strikes.poison("ValueError"))),
    Kind("lose a report", 2, strikes.on_worker(strikes.mumble), at_worst=NOTHING),
    Kind("reset a connection", 3, strikes.on_training(strikes.reset), at_worst=IN_PLACE, noticed_s=2.5),
    Kind("lose a message for good", 1, strikes.on_training(strikes.stick), at_worst=IN_PLACE, noticed_s=10.0),
    Kind("damage an own snapshot", 2, strikes.on_training(strikes.damage_own), at_worst=NOTHING),
    Kind("damage a peer copy", 2, strikes.on_training(strikes.damage_copy), at_worst=NOTHING),
    Kind("kill an agent", 2, strikes.on_agent(strikes.kill_agent), may_end_control=True),
    Kind("an agent ends", 0.7, strikes.on_agent(strikes.agent_ends), may_end_control=True),
    Kind("pause an agent", 2, strikes.on_agent(strikes.pause_agent)),
    Kind("tell an agent to end", 0.15, strikes.on_agent(strikes.tell_to_end)),
    Kind("power off a node", 1.5, strikes.on_agent(strikes.power_off), may_end_control=True),
    Kind("power cycle a node", 2, strikes.on_agent(strikes.power_cycle), may_end_control=True),
    Kind("cut a node off", 3, strikes.on_agent(strikes.cut)),
    Kind("cut a node off one way", 2, strikes.on_agent(strikes.cut_one_way)),
    Kind("flapping link", 1, strikes.on_agent(strikes.flap)),
    Kind("slow link", 1, strikes.on_agent(strikes.slow_link)),
    Kind("kill the control plane", 4, strikes.control_dies, may_end_control=True, at_worst=NOTHING),
    Kind("pause the control plane", 2, strikes.control_pauses, may_end_control=True, at_worst=NOTHING),
    Kind("workers start late", 1.5, strikes.trouble("late")),
    Kind("workers do not start", 1.5, strikes.trouble("exits")),
    Kind("workers hang at the start", 0.7, strikes.trouble("never")),
    Kind("repeat an old report", 3, strikes.echo, at_worst=NOTHING),
    Kind("repeat reports of an earlier epoch", 4, strikes.echo_later, at_worst=NOTHING),
    Kind("repeat an old order", 2, strikes.on_worker(strikes.echo_order), at_worst=NOTHING),
    Kind("repeat orders of an earlier epoch", 3, strikes.echo_orders_later, at_worst=NOTHING),
)
BY_NAME = {kind.name: kind for kind in KINDS}
HARMLESS = (
    "repeat an old report",
    "repeat reports of an earlier epoch",
    "repeat an old order",
    "repeat orders of an earlier epoch",
)
"""Kinds of faults that cannot justify any reaction of the control plane."""
_PAUSES_S = (0.0, 0.0, 0.02, 0.2, 1.0, 3.0, 8.0)
"""Virtual seconds between two timed faults, before a random factor."""
_BEGIN_S = (0.0, 2.0, 4.0, 6.0, 9.0)
"""Virtual seconds from the start of a run until its first timed fault."""
_AFTERWARDS_S = 4.0
"""A run lasts so many virtual seconds longer than its last timed fault, so that the consequences of the fault are over
before the run ends.
"""
_AGAIN_S = 1.0
"""Virtual seconds until a fault that has found no target is tried again."""
_AMBUSH_S = (0.0, 0.005, 0.05, 0.2, 0.6)
"""Virtual seconds from an order to a fault that is triggered by the order."""


class Schedule:
    """The faults of one run: timed faults at drawn times, the others shortly after an order, while a recovery is in
    progress.

    Attributes:
        kinds: the faults to inject.
        struck: (kind, phase of the control plane) of each injected fault.
        alone: (``at_worst``, target, true time until which an epoch must be closed) of the last fault;
            ``at_worst`` is ``ANYTHING`` unless it is the run's only fault and struck during training.
    """

    def __init__(self, rng: random.Random, most: int, names: tuple[str, ...] | None = None):
        kinds = [kind for kind in KINDS if names is None or kind.name in names]
        count = rng.choice([n for n in (0, 1, 1, 1, 2, 2, 3, 4, 6, 9, *range(10, most + 1)) if n <= most])
        self.kinds = rng.choices(kinds, [kind.weight for kind in kinds], k=count)
        self._ambushes = [kind for kind in self.kinds if rng.random() < 0.45] if count > 1 else []
        self._timed = [kind for kind in self.kinds if kind not in self._ambushes]
        self.struck: list[tuple[str, str]] = []
        self.alone = (ANYTHING, "", 0.0)

    @property
    def may_end_control(self) -> bool:
        return any(kind.may_end_control for kind in self.kinds)

    def begin(self, cluster: "Cluster") -> None:
        """Schedule the timed faults, and let the others wait for an order."""
        when = cluster.rng.choice(_BEGIN_S)
        for kind in self._timed:
            when += cluster.rng.choice(_PAUSES_S) * cluster.rng.uniform(0.5, 1.5)
            cluster.time.after(when, self._strike, cluster, kind)
        cluster.calm_at = max(cluster.calm_at, when)
        cluster.lengthen(when + _AFTERWARDS_S)
        if self._ambushes:
            cluster.on_order.append(lambda order: self._lie_in_wait(cluster, order))

    def _lie_in_wait(self, cluster: "Cluster", order: Any) -> None:
        interesting = isinstance(order, m.Close | m.Open | m.Repair | m.Resume | m.Restart | m.Spawn)
        if self._ambushes and interesting and cluster.struck and cluster.rng.random() < 0.4:
            kind = self._ambushes.pop()
            cluster.time.after(cluster.rng.choice(_AMBUSH_S), self._strike, cluster, kind)

    def _strike(self, cluster: "Cluster", kind: Kind, tries: int = 8) -> None:
        """Inject a fault now; without a target for the fault, try again later, at most ``tries`` times."""
        if cluster.plane.state.phase == ENDED:
            return
        phase = cluster.plane.state.phase if cluster.plane.is_up else "control plane away"
        before = len(cluster.struck)
        if kind.name not in HARMLESS:
            cluster.struck.append((cluster.time.now, kind.name))
        whom = kind.strike(cluster)
        if not whom:
            del cluster.struck[before:]
            if tries:
                cluster.time.after(_AGAIN_S, self._strike, cluster, kind, tries - 1)
            return
        cluster.note("FAULT {}: {}", kind.name, whom)
        cluster.calm_at = max(cluster.calm_at, cluster.time.now)
        self.struck.append((kind.name, phase))
        has_snapshots = cluster.checks.committed > cluster.load(cluster.plane.state.epoch)[0]
        is_alone = len(self.struck) == 1 and phase == RUNNING and has_snapshots and cluster.shape.hot_swap
        limit = cluster.time.now + kind.noticed_s
        self.alone = (kind.at_worst, whom, limit) if is_alone else (ANYTHING, whom, limit)
