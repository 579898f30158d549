"""Define the flags of ``ft plan disruption``, and build from them the run whose cost of failures is computed.

The command compares restarts from a checkpoint with hot-swap, in which a standby (a warm, idle node) takes over.
"""

import argparse
import statistics
from dataclasses import dataclass

from ft.base import files
from ft.base.errors import UserError
from ft.base.quantities import argument, between, count, duration, seconds
from ft.lab.plan.disruption.measured import Measured, measured
from ft.lab.plan.disruption.model import Cluster, HotSwap, Training, mttf
from ft.lab.plan.disruption.replay import Empirical, Replay, Uniform
from ft.record.run import load

_PARTS = ("detect", "rebuild", "restore")


@dataclass(frozen=True)
class Plan:
    """The planned run.

    Attributes:
        cluster: the cluster, and how often it fails.
        training: times of steps, checkpoints and restarts.
        fallback: number of steps between checkpoints in a run with hot-swap, 0 for none.
        replay: model of the number of steps that a failure discards.
        swap: durations of a hot-swap.
        price: price of a GPU hour, or None.
        steps: number of steps of the whole run, or None.
        measured: times from a recorded run, or None.
    """

    cluster: Cluster
    training: Training
    fallback: int
    replay: Replay
    swap: HotSwap
    price: float | None
    steps: int | None
    measured: Measured | None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to ``parser``."""
    group = parser.add_argument_group("cluster")
    group.add_argument(
        "--gpus", type=count(), required=True, metavar="N", help="number of GPUs that train, without standbys"
    )
    group.add_argument(
        "--gpus-per-node", type=count(), default=8, metavar="N", help="number of GPUs in a node (default: 8)"
    )
    group.add_argument(
        "--mtbf-gpu", type=duration(1e-6), metavar="TIME", help="mean time between two failures of one GPU"
    )
    group.add_argument(
        "--mtbf-node",
        type=duration(1e-6),
        metavar="TIME",
        help="mean time between two failures of the other parts of one node",
    )
    group.add_argument(
        "--mttf",
        type=duration(1e-6),
        metavar="TIME",
        help="mean time between two failures of the run, instead of the two flags above",
    )
    group.add_argument("--standbys", type=count(0), default=1, metavar="N", help="standby nodes (default: 1)")
    group.add_argument(
        "--repair-time",
        type=duration(0.0),
        default=0.0,
        metavar="TIME",
        help="time until a failed node is available again as a standby (default: 0: a standby is always available)",
    )
    group = parser.add_argument_group("training")
    group.add_argument("--step-time", type=duration(1e-6), metavar="TIME", help="duration of a step")
    group.add_argument(
        "--steps", type=count(), metavar="N", help="number of steps of the whole run, to compute its duration"
    )
    group.add_argument("--interrupted", type=argument(between(0.0, 1.0)), default=0.5, metavar="PHI", help=_INTERRUPTED)
    group.add_argument("--failure-steps", metavar="N,N,...|FILE", help=_FAILURE_STEPS)
    group = parser.add_argument_group("restart from a checkpoint")
    group.add_argument(
        "--checkpoint-interval", type=count(), required=True, metavar="STEPS", help="steps between two checkpoints"
    )
    group.add_argument(
        "--checkpoint-cost",
        type=duration(0.0),
        required=True,
        metavar="TIME",
        help="time for which one checkpoint stops training",
    )
    group.add_argument(
        "--restart-time",
        type=duration(0.0),
        metavar="TIME",
        help="time from a failure to the first step, without replay",
    )
    group = parser.add_argument_group("hot-swap")
    group.add_argument(
        "--detect",
        type=duration(0.0),
        metavar="TIME",
        help="time until the survivors have left the step and the standby has arrived",
    )
    group.add_argument(
        "--rebuild",
        type=duration(0.0),
        metavar="TIME",
        help="time to rebuild the process groups: tools/bench/rebuild.py measures it",
    )
    group.add_argument(
        "--restore", type=duration(0.0), metavar="TIME", help="time to restore the state, up to the first new step"
    )
    group.add_argument(
        "--hot-swap-time",
        type=argument(_mean_time),
        metavar="TIME,...",
        help="mean time of a whole hot-swap, instead of its parts",
    )
    group.add_argument(
        "--protect", type=duration(0.0), default=0.0, metavar="TIME", help="time by which snapshots prolong a step"
    )
    group.add_argument("--fallback-interval", type=count(0), metavar="STEPS", help=_FALLBACK)
    group.add_argument(
        "--from-run", metavar="DIR", help="take the times that are not given here from the events of this run"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--price",
        type=argument(between(0.0, 1e6)),
        metavar="DOLLARS",
        help="price of a GPU hour; the output then also shows money",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text; times are in seconds"
    )
    group.add_argument("--plot", metavar="FILE", help="write a picture of the comparison to this PNG file")


_INTERRUPTED = "expected share of the interrupted step that was already computed (default: 0.5)"
_FAILURE_STEPS = "steps at which recorded failures struck: use the empirical replay model instead of the uniform one"
_FALLBACK = (
    "number of steps between checkpoints in a run with hot-swap (default: --checkpoint-interval; 0: no checkpoints)"
)


def plan_of(given: argparse.Namespace) -> Plan:
    """Build the plan from the flags.

    Raises:
        UserError: a flag is missing, or contradicts another one.
    """
    run = measured(load(given.from_run)) if given.from_run is not None else None
    step = _or_measured(given.step_time, run and run.step_s, "--step-time", "how long a step takes")
    restart = _or_measured(given.restart_time, run and run.restart_s, "--restart-time", "how long a restart takes")
    cluster = _cluster(given)
    training = Training(step, given.checkpoint_interval, given.checkpoint_cost, restart, given.interrupted)
    fallback = given.checkpoint_interval if given.fallback_interval is None else given.fallback_interval
    if fallback == 0 and cluster.no_standby > 0:
        raise UserError(
            "--fallback-interval 0 means no checkpoints, but a failure finds no standby with probability "
            f"{cluster.no_standby:.2g}",
            "give a --fallback-interval above 0, or more --standbys, or a shorter --repair-time",
        )
    swap = HotSwap(_parts(given, run), given.protect)
    return Plan(cluster, training, fallback, _replay(given.failure_steps), swap, given.price, given.steps, run)


def _cluster(given: argparse.Namespace) -> Cluster:
    if given.gpus % given.gpus_per_node:
        raise UserError(
            f"--gpus {given.gpus} is not a multiple of --gpus-per-node {given.gpus_per_node}", "give whole nodes"
        )
    each = given.mtbf_gpu or given.mtbf_node
    if bool(given.mttf) == bool(each):
        said = "--mttf cannot be combined with --mtbf-gpu or --mtbf-node" if each else "the rate of failures is missing"
        raise UserError(said, "give --mttf of the run, or --mtbf-gpu and --mtbf-node of its parts")
    between = given.mttf or mttf(given.gpus, given.gpus_per_node, given.mtbf_gpu, given.mtbf_node)
    cluster = Cluster(given.gpus, given.gpus_per_node, between, given.standbys, given.repair_time)
    if cluster.in_repair >= cluster.nodes:
        raise UserError(
            f"a failure every {between:.4g} s and {given.repair_time:.4g} s to repair a node: "
            f"{cluster.in_repair:.0f} nodes would be away at any time, and there are {cluster.nodes}",
            "check --repair-time and the failure rates",
        )
    return cluster


def _parts(given: argparse.Namespace, run: Measured | None) -> dict[str, float]:
    single = [name for name in _PARTS if getattr(given, name) is not None]
    if given.hot_swap_time is not None:
        if single:
            raise UserError(f"--hot-swap-time already includes --{single[0]}", "give one or the other")
        return {"hot-swap": given.hot_swap_time}
    known = run.parts if run is not None else {}
    what = "how long that part of a hot-swap takes"
    return {name: _or_measured(getattr(given, name), known.get(name), f"--{name}", what) for name in _PARTS}


def _or_measured(given: float | None, run: float | None, flag: str, what: str) -> float:
    value = run if given is None else given
    if value is None:
        raise UserError(f"{flag} is missing: {what}", f"give {flag}, or --from-run with a run in which it is on record")
    return value


def _replay(text: str | None) -> Replay:
    """Return the replay model for steps separated by commas, or for a file with one step on each line.

    Raises:
        UserError: ``text`` is neither.
    """
    if text is None:
        return Uniform()
    words = text.split(",")
    if not all(_is_step(word) for word in words):
        try:
            words = files.read_text(text).split()
        except (OSError, ValueError) as error:
            raise UserError(
                f"--failure-steps {text}: neither steps nor a readable file: {error}", _STEPS_FIX
            ) from error
    wrong = next((word for word in words if not _is_step(word)), None)
    if wrong is not None or not words:
        problem = "is empty" if wrong is None else f"contains {wrong[:40]!r}, which is not a step"
        raise UserError(f"--failure-steps {text} {problem}", _STEPS_FIX)
    return Empirical([int(word) for word in words])


def _is_step(word: str) -> bool:
    return word.strip().isdecimal() and len(word) < 20


_STEPS_FIX = "give whole numbers: 18,2366, or a file with one on each line"


def _mean_time(text: str) -> float:
    return statistics.fmean(seconds(word, 0.0) for word in text.split(","))
