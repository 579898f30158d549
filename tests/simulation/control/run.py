"""Simulation of one run of the control plane from a seed, with its invariants checked.

A simulated run is called a history. The cluster's layout and the faults are drawn from the seed.
"""

import random
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ft.job import messages as m
from ft.job.control.state import ENDED
from tests.simulation.control.checks import Violation
from tests.simulation.control.cluster import Cluster
from tests.simulation.control.faults import Schedule
from tests.simulation.control.restart_oracle import check_alone
from tests.simulation.control.shape import draw_shape

STUCK_S = 90.0
"""Virtual seconds without progress and without a fault that count as a hang: all deadlines of one recovery together."""
LONGEST_S = 3000.0
"""Virtual seconds after which a run counts as a hang in any case."""
_CATEGORIES = {
    "told to end": "an agent was told to end",
    "used up": "warm restarts used up",
    "cannot hold": "too few nodes left",
    "before training began": "node lost before training began",
    "came within": "agents missing at the start",
    "workers were announced": "agents missing at the start",
    "the same error": "software error again after a restart",
}
"""Part of the message of an order to stop -> outcome of the history."""


@dataclass(frozen=True)
class SimulationOptions:
    """The user's options for all simulated runs.

    Attributes:
        faults: maximum number of faults in one run.
        ranks: number of logical ranks (positions in the parallel layout); None: random.
        kinds: kinds of faults to use; None: all.
    """

    faults: int = 9
    ranks: int | None = None
    kinds: tuple[str, ...] | None = None


@dataclass
class History:
    """The result of one simulated run.

    Attributes:
        seed: seed from which the run was drawn.
        outcome: short description of how the run ended.
        violation: the property that does not hold, "" if all properties hold.
        struck: (kind of fault, phase of the control plane) of each fault.
        seconds: duration of the run in virtual seconds.
        restarts: number of warm restarts (all workers are killed and started from the last checkpoint).
        epochs: number of epochs opened (an epoch is a version of the map from logical ranks to workers).
        redone: number of committed steps that were executed again.
        crashes: number of deaths of the control plane.
        messages: number of reports processed and orders published, by type.
        lines: event log, empty unless requested.
    """

    seed: int
    outcome: str = ""
    violation: str = ""
    struck: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    restarts: int = 0
    epochs: int = 0
    redone: int = 0
    crashes: int = 0
    messages: Counter = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def simulate(seed: int, options: SimulationOptions, with_lines: bool = False) -> History:
    """Simulate the run of ``seed``. The simulation is deterministic: the same arguments give the same result.

    Args:
        seed: source of the layout and the faults.
        options: the user's options.
        with_lines: whether to keep the event log.
    """
    history, rng = History(seed), random.Random(seed)
    shape, schedule = draw_shape(rng, options.ranks), Schedule(rng, options.faults, options.kinds)
    lines = history.lines if with_lines else None
    if lines is not None:
        lines.append(f"seed {seed}: {shape}")
        lines.append("planned faults: " + (", ".join(kind.name for kind in schedule.kinds) or "none"))
    with _journal(needed=schedule.may_end_control) as path:
        cluster = Cluster(rng, shape, path, lines)
        try:
            _play(cluster, schedule)
            check_alone(cluster, *schedule.alone)
        except Violation as violation:
            history.violation = str(violation)
        except Exception as error:  # an exception in the decision code is reported as a violation too
            where = traceback.extract_tb(error.__traceback__)[-1]
            history.violation = f"{type(error).__name__} in {where.name}, line {where.lineno}: {error}"
    _sum_up(history, cluster, schedule)
    return history


def _play(cluster: Cluster, schedule: Schedule) -> None:
    cluster.start()
    schedule.begin(cluster)
    turns = 0
    while cluster.plane.state.phase != ENDED or not cluster.plane.is_up:
        if not cluster.time.turn():
            cluster.checks.fail("no event is left, but the run has not ended")
        turns += 1
        if turns % 64 == 0 and cluster.is_deserted():
            return
        if turns % 64 == 0 and (cluster.checks.is_stuck(STUCK_S) or cluster.time.now > LONGEST_S):
            state = cluster.plane.state
            cluster.checks.fail(
                f"a hang: {state.phase} for {cluster.plane.clock() - state.since:.1f} s; last progress at "
                f"{cluster.checks.progress_at:.1f} s, last fault at {cluster.calm_at:.1f}, now {cluster.time.now:.1f}"
            )


def _sum_up(history: History, cluster: Cluster, schedule: Schedule) -> None:
    state, log = cluster.plane.state, cluster.plane.log
    history.struck, history.seconds = schedule.struck, cluster.time.now
    history.restarts = sum(isinstance(order, m.Restart) for order in log)
    history.messages = Counter(type(message).__name__ for message in (*cluster.plane.said, *log))
    history.epochs, history.redone, history.crashes = state.epoch + 1, cluster.checks.redone, cluster.crashes
    if history.violation:
        history.outcome = "VIOLATION"
    elif log and isinstance(log[-1], m.Finish):
        how = "finished" if not schedule.struck else "recovered and finished"
        history.outcome = "restarted and finished" if history.restarts else how
    elif state.phase != ENDED or not cluster.plane.is_up:
        history.outcome = "all nodes lost"
    else:
        history.outcome = "stopped: " + _category(log[-1].message)
    if history.lines:
        history.lines.append(
            f"{cluster.time.now:10.4f}  {history.outcome}{': ' if history.violation else ''}{history.violation}"
        )


def _category(message: str) -> str:
    for words in _CATEGORIES:
        if words in message:
            return _CATEGORIES[words]
    if "was killed by" in message or "exited with" in message:
        return "worker lost before any attached"
    return message[:80]


@contextmanager
def _journal(needed: bool) -> Iterator[Path | None]:
    if not needed:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ft-simulate-") as folder:
        yield Path(folder) / "journal.jsonl"
