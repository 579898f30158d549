"""Read the folder of a run, and compute once what status and report show of it.

With FT-HSDP the run's folder has a folder for each replica; without it, it is that of its only replica. The run may
still be in progress: folders of replicas may be missing, and files may end in incomplete lines.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from ft.base import events
from ft.base.errors import UserError
from ft.base.events import Event
from ft.observe.report import goodput, lanes
from ft.observe.report.goodput import Effective, Goodput
from ft.observe.report.lanes import OFFLINE, ONLINE, REBUILDING, ReplicaInterval
from ft.observe.report.lineage import FAILURE, Audit, Incident, Lineage, Pace, Step, audit, find, lineage, replica_of
from ft.observe.report.protections import Corruption, corruption
from ft.record import run
from ft.record.block import what_failed
from ft.record.recoveries import Recovery, recoveries
from ft.record.run import NOT_ENDED, number
from ft.show import palette
from ft.systems.hsdp import commits, loader_state
from ft.systems.hsdp.commits import Commit
from ft.systems.hsdp.loader_state import LoaderState

_FOLDER = re.compile(r"replica-(\d+)")
NOTHING = "nothing on record"
_FIX = "give the folder that was given to ft run as --run-dir"


@dataclass(frozen=True)
class Replica(run.Run):
    """The record of one replica: what its control plane and its workers have written.

    Attributes:
        commits: lines of its commit log, one for each step that it committed; empty without FT-HSDP.
    """

    commits: list[Commit] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return how it has ended (``ft.record.run.Run.state``), or "nothing on record"."""
        return super().state if self.events or self.metrics else NOTHING

    @cached_property
    def recoveries(self) -> list[Recovery]:
        return recoveries(self.events)

    @cached_property
    def goodput(self) -> Goodput:
        return goodput.goodput(self.metrics, self.events, self.recoveries)

    @cached_property
    def corruption(self) -> Corruption | None:
        return corruption(self.events)


@dataclass(frozen=True)
class Mark:
    """A vertical line across the loss curve.

    Attributes:
        at: position of the line on the horizontal axis.
        title: what happened there.
    """

    at: float
    colour: str
    title: str


@dataclass(frozen=True)
class Losses:
    """The loss after each step whose loss is known.

    Attributes:
        points: (amount, loss) after each step.
        over: what the amount counts: "step", "tokens" or "samples".
        at: step -> amount at the end of that step.
        marks: recoveries, or failures of replicas.
    """

    points: list[tuple[float, float]]
    over: str
    at: dict[int, float]
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """The record of a run.

    Attributes:
        replicas: number of a replica -> its record, for the replicas that have a folder.
        has_quorum: whether the run is one of FT-HSDP, with a quorum server and commit logs.
        events: events of the quorum server, in order of time.
        positions: content of the file ``loader_state`` (each replica's position in the data), None without that file.
        problem: why ``loader_state`` could not be read, or "".
    """

    folder: Path
    replicas: dict[int, Replica]
    has_quorum: bool
    events: list[Event] = field(default_factory=list)
    positions: LoaderState | None = None
    problem: str = ""

    @property
    def only(self) -> Replica:
        """Return the replica of a run without FT-HSDP."""
        [only] = self.replicas.values()
        return only

    @cached_property
    def count(self) -> int:
        """Return the number of replicas of the run, with or without a folder."""
        from_commits = (commit.assignment.replicas for one in self.replicas.values() for commit in one.commits)
        from_events = (1 + number for event in self.events if (number := replica_of(event)) is not None)
        return max([1 + max(self.replicas), *from_commits, *from_events])

    @cached_property
    def history(self) -> list[tuple[int | None, Event]]:
        """Return (replica, event) for all events in order of time; the replica is None for the quorum server."""
        found = [(None, event) for event in self.events]
        found += [(number, event) for number, one in self.replicas.items() for event in one.events]
        return sorted(found, key=lambda item: item[1].wall)

    @property
    def state(self) -> str:
        """Return the state in a few words: that of the replicas, or their states where these differ.

        If all replicas have ended as planned, it is the state of one that could not save the last checkpoint, which one
        replica writes for all, or else of one that has done all steps.
        """
        states = {number: one.state for number, one in sorted(self.replicas.items())}
        if len(set(states.values())) == 1:
            return next(iter(states.values()))
        ended = [state for state in states.values() if run.is_planned_end(state)]
        if len(ended) == len(states):
            return min(ended, key=lambda state: (run.NOT_SAVED not in state, state != run.FINISHED))
        finished = len(ended)
        others = ", ".join(f"replica {number} {state}" for number, state in states.items() if state not in ended)
        return f"finished by {finished} of {len(states)} ({others})" if finished else others

    @property
    def has_ended(self) -> bool:
        """Return whether all replicas have ended."""
        return all(one.state not in (NOT_ENDED, NOTHING) for one in self.replicas.values())

    @cached_property
    def lineage(self) -> Lineage:
        """Return which committed steps are part of the current training state; no steps without FT-HSDP."""
        return lineage({number: one.commits for number, one in self.replicas.items()})

    @property
    def steps(self) -> list[Step]:
        return self.lineage.steps

    @cached_property
    def audit(self) -> Audit:
        return audit(self.lineage)

    @cached_property
    def _found(self) -> tuple[Pace, list[Incident]]:
        return find(self.steps, self.events)

    @property
    def pace(self) -> Pace:
        """Return the durations of the steps."""
        return self._found[0]

    @property
    def incidents(self) -> list[Incident]:
        """Return the failures and rejoins of replicas, and full restarts."""
        return self._found[1]

    def of_kind(self, kind: str) -> list[Incident]:
        """Return the incidents of one kind (FAILURE, REJOIN or RESTART)."""
        return [one for one in self.incidents if one.kind == kind]

    @cached_property
    def recoveries(self) -> list[tuple[int, Recovery]]:
        """Return (replica, recovery) for the recoveries inside the replicas, in order of time."""
        found = [(number, recovery) for number, one in self.replicas.items() for recovery in one.recoveries]
        return sorted(found, key=lambda item: item[1].began.wall)

    @cached_property
    def corruptions(self) -> list[tuple[int, Corruption]]:
        """Return (replica, what DMR did in it) for the replicas with events of DMR."""
        return [(number, one.corruption) for number, one in self.replicas.items() if one.corruption is not None]

    @cached_property
    def effective(self) -> Effective:
        """Return the effective training time, as FT-HSDP defines it."""
        if self.has_quorum:
            return goodput.effective(self.steps, self.pace, self.incidents, self.count)
        return goodput.effective_of_one(self.only.goodput, self.only.recoveries)

    @cached_property
    def zero(self) -> float:
        """Return the wall time at which the relative times of the report start.

        It is the first event or, if earlier, the first step; without FT-HSDP it is the opening of the first epoch.
        """
        if not self.has_quorum:
            return lanes.origin(self.only.events)
        return lanes.first_moment(self.history, self.steps)

    @cached_property
    def lanes(self) -> list[ReplicaInterval]:
        """Return when each replica was in which state."""
        return lanes.replica_intervals(self)

    def seconds_in(self, replica: int, state: str) -> float:
        """Return the total seconds that the replica was in ``state``."""
        return sum(lane.end - lane.begin for lane in self.lanes if (lane.replica, lane.state) == (replica, state))

    def times_offline(self, replica: int) -> int:
        """Return how often the replica stopped contributing."""
        own = [lane for lane in self.lanes if lane.replica == replica]
        return sum(a.state == ONLINE and b.state in (OFFLINE, REBUILDING) for a, b in pairwise(own))

    @cached_property
    def losses(self) -> Losses:
        return _losses(self) if self.has_quorum else _losses_of_one(self.only)


def load(folder: str | Path, most: int | None = None) -> Record:
    """Read the run's folder; incomplete lines are skipped.

    Args:
        folder: folder of the run, or of one replica.
        most: number of bytes to read from the end of each replica's commit log; None: all.

    Raises:
        UserError: there is no such folder, it contains no run, or it cannot be read.
    """
    folder = Path(folder)
    found = _folders(folder)
    if not found:
        return Record(folder, {0: Replica(**vars(run.load(folder)))}, has_quorum=False)
    try:
        replicas = {number: _replica(path, most) for number, path in sorted(found.items())}
        history = sorted(events.read(folder / run.EVENTS), key=lambda event: event.wall)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}", _FIX) from error
    try:
        return Record(folder, replicas, True, history, loader_state.read(folder))
    except UserError as error:
        return Record(folder, replicas, True, history, problem=error.problem)


def _replica(folder: Path, most: int | None) -> Replica:
    try:
        own = run.load(folder)
    except UserError:
        own = run.Run(folder)
    return Replica(**vars(own), commits=commits.read(folder, most))


def _folders(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    matches = ((_FOLDER.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return {int(match[1]): path for match, path in matches if match}


def _losses_of_one(only: Replica) -> Losses:
    """Return the losses over the steps, with a mark at each step that was redone after a recovery."""
    points = [(m["step"], loss) for m in only.metrics if (loss := number(m, "loss")) is not None]
    marks = [
        Mark(r.step + 1, palette.OUTCOME[r.outcome], f"recovery {r.number}, step {r.step + 1}: {what_failed(r)}")
        for r in only.recoveries
        if r.step is not None
    ]
    steps = {event.step for event in only.events if event.step is not None}
    return Losses(points, "step", {step: step for step in steps}, marks)


def _losses(record: Record) -> Losses:
    """Return the losses from the commit logs or, where a commit has none, from the metrics of a replica in the step.

    The amount counts tokens where the tokens of all steps are known, else samples. Failures of replicas are marked.
    """
    metrics = {replica: {m["step"]: m for m in one.metrics} for replica, one in record.replicas.items()}
    length = _tokens_per_sample(metrics)
    knows = all(step.commit.tokens is not None for step in record.steps) or length is not None
    points, at, amount = [], {}, 0.0
    for step in record.steps:
        samples = step.commit.batch * len(step.commit.streams)
        tokens = step.commit.tokens if step.commit.tokens is not None else samples * (length or 0.0)
        amount += tokens if knows else samples
        at[step.number] = amount
        values = (metrics.get(replica, {}).get(step.number, {}) for replica in sorted(step.by))
        known = [value for each in values if (value := number(each, "loss")) is not None]
        loss = step.loss if step.loss is not None else next(iter(known), None)
        if loss is not None:
            points.append((amount, loss))
    failures = [one for one in record.of_kind(FAILURE) if one.first in at]
    marks = [Mark(at[f.first], palette.FAULT, f"step {f.first}: {f.reason or 'a failure'}") for f in failures]
    return Losses(points, "tokens" if knows else "samples", at, marks)


def _tokens_per_sample(metrics: dict[int, dict[int, dict]]) -> float | None:
    """Return the tokens per sample, computed from a step's tokens per second, seconds and samples, or None."""
    for steps in metrics.values():
        for each in steps.values():
            figures = [number(each, name) for name in ("tokens_per_s", "step_time_s", "global_batch_size")]
            if all(figures):
                return float(round(figures[0] * figures[1] / figures[2]))
    return None
