"""Read the folder of a run, and compute once what status and report show of it.

With FT-HSDP the run's folder has a folder for each replica; without it, it is that of its only replica. The run may
still be in progress: folders of replicas may be missing, and files may end in incomplete lines.

Goodput is the share of a run's wall time that was spent on committed steps. Steps that are rolled back and computed
again count only once. Training begins when the first epoch opens. Effective training time (FT-HSDP, section 6.1) is the
share of the wall time that the same work would take without failures; the paper's example is a test.

The lanes of the timeline say which worker held which logical rank, which follows from the epochs, and which state each
replica was in, which follows from the event logs and from the replicas' commit logs.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ft.base import events
from ft.base.errors import UserError
from ft.base.events import Event, elapsed
from ft.observe.report.lineage import (
    FAILURE,
    REJOIN,
    Audit,
    Incident,
    Lineage,
    Step,
    StepPace,
    audit,
    find,
    lineage,
    replica_of,
)
from ft.observe.report.protections import Corruption, corruption
from ft.record import run
from ft.record.recoveries import Recovery, recoveries, seats_of
from ft.record.run import NOT_ENDED, number
from ft.show import palette
from ft.systems.hsdp import commits
from ft.systems.hsdp.commits import Commit

_PAPER_BETWEEN_S = 1080.0


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, in seconds.

    Attributes:
        wall: from the opening of the first epoch to the end of the run, or to its last event or step if it has not
            ended.
        startup: from the start of the run to the opening of the first epoch.
        productive: total time of the steps that were committed and not rolled back.
        recovering: from the fault to the next step, in total over the recoveries.
        other: the rest of ``wall``: repeated steps, evaluations, checkpoint saves, waiting.
        step: median time of a step, None before there is a step.
    """

    wall: float
    startup: float
    productive: float
    recovering: float
    other: float
    step: float | None
    steps: int

    @property
    def share(self) -> float | None:
        """Return ``productive`` as a share of ``wall`` (0 to 1), None where nothing was measured."""
        return min(1.0, self.productive / self.wall) if self.wall > 0 and self.steps else None


def goodput(metrics: Sequence[dict[str, Any]], history: Sequence[Event], found: Sequence[Recovery]) -> Goodput:
    """Compute the goodput of a run.

    Args:
        metrics: one mapping per step, with ``step_time_s``.
    """
    times = [t for m in metrics if (t := number(m, "step_time_s")) is not None]
    productive = sum(times)
    wall, startup = _spans(history, productive)
    recovering = sum(r.total for r in found if r.total is not None)
    return Goodput(
        wall=wall,
        startup=startup,
        productive=productive,
        recovering=recovering,
        other=max(0.0, wall - productive - recovering),
        step=statistics.median(times) if times else None,
        steps=len(metrics),
    )


def _spans(history: Sequence[Event], productive: float) -> tuple[float, float]:
    """Return (wall time of training, wall time before it) in seconds; without events, wall time is the steps' time."""
    if not history:
        return productive, 0.0
    begin = next((e for e in history if e.name == events.RUN_STARTED), history[0])
    opened = next((e for e in history if e.name == events.EPOCH_OPENED), begin)
    end = next((e for e in reversed(history) if e.name in (events.FINISHED, events.STOPPED)), history[-1])
    ended = end.name in (events.FINISHED, events.STOPPED)
    wall = elapsed(opened, end)
    # A run that has not ended writes no events during undisturbed training, so its steps may reach beyond the last
    # event.
    return (wall if ended else max(wall, productive)), elapsed(begin, opened)


def asynchronous(between_s: float, repair_s: float, stall_s: float, replicas: float, lost: float = 1) -> float:
    """Return the effective training time (0 to 1) if the other replicas continue during the repair.

    This generalises the formula of FT-HSDP, section 6.1, to several lost replicas.

    Args:
        between_s: seconds from one failure to the next.
        repair_s: seconds until the lost replicas contribute again.
        stall_s: seconds of the failure and the rejoin during which all replicas stall.
        lost: number of replicas lost in one failure.
    """
    stall = min(stall_s, between_s)
    away = min(max(repair_s, stall), between_s)
    return (between_s - away + (away - stall) * (replicas - lost) / replicas) / between_s


@dataclass(frozen=True)
class Effective:
    """Effective training time of a run, as shares from 0 to 1.

    Attributes:
        measured: sum over the steps of (normal step time x share of replicas that contributed), divided by ``wall_s``.
        wall_s: total duration of the steps in seconds.
        between_s: ``wall_s`` per failure, None without a failure.
        stall_s: mean stall per failure in seconds, its rejoin included.
        repair_s: mean seconds until a lost replica contributed again.
        formula: result of the formula of FT-HSDP, section 6.1, with these figures; None without a repaired failure.
        paper_rate: ``formula`` with a failure every 18 minutes, as in the paper; None without a repaired failure.
    """

    measured: float | None
    wall_s: float = 0.0
    failures: int = 0
    between_s: float | None = None
    stall_s: float | None = None
    repair_s: float | None = None
    formula: float | None = None
    paper_rate: float | None = None


def effective(steps: Sequence[Step], pace: StepPace, incidents: Sequence[Incident], replicas: int) -> Effective:
    """Return the effective training time of a run, given the surviving steps."""
    wall = sum(pace.took)
    if not steps or wall <= 0:
        return Effective(None)
    useful = sum(
        normal * len(step.commit.streams) / step.commit.assignment.replicas
        for step, normal in zip(steps, pace.normal, strict=True)
    )
    failures = [one for one in incidents if one.kind == FAILURE and one.replicas]
    away = [away_s for one in incidents if one.kind == REJOIN for away_s in one.away_s]
    stalls = [one.stall_s for one in incidents if one.kind in (FAILURE, REJOIN)]
    return _effective(useful, wall, [len(one.replicas) for one in failures], sum(stalls), away, replicas)


def effective_of_one(times: Goodput, found: Sequence[Recovery]) -> Effective:
    """Return the effective training time of a run with one replica, which waits for each of its recoveries."""
    if times.step is None or times.wall <= 0:
        return Effective(None)
    took = [r.total for r in found if r.total is not None]
    return _effective(times.steps * times.step, times.wall, [1] * len(found), sum(took), took, 1)


def _effective(
    useful: float, wall: float, lost: Sequence[int], stalled: float, away: Sequence[float], replicas: int
) -> Effective:
    """Return the effective training time of a run.

    Args:
        useful: seconds that the same work takes without failures.
        wall: seconds that it took.
        lost: number of replicas lost in each failure.
        stalled: seconds of the stalls of all failures and rejoins.
        away: seconds until a lost replica contributed again, for each that did.
    """
    measured, failures = min(1.0, useful / wall), len(lost)
    if not failures:
        return Effective(measured, wall)
    between, stall = wall / failures, stalled / failures
    if not away:
        return Effective(measured, wall, failures, between, stall)
    repair, at_once = statistics.mean(away), statistics.mean(lost)
    return Effective(
        *(measured, wall, failures, between, stall, repair),
        formula=asynchronous(between, repair, stall, replicas, at_once),
        paper_rate=asynchronous(_PAPER_BETWEEN_S, repair, stall, replicas, at_once),
    )


ONLINE, CATCHING_UP, REBUILDING, OFFLINE = "online", "catching up", "rebuilding", "offline"
STATES = (ONLINE, CATCHING_UP, REBUILDING, OFFLINE)
_OVER = ""

_BROKEN = (events.FAULT_DETECTED, events.EPOCH_CLOSED)
_BUILT = (events.RUN_STARTED, events.WORKER_STARTED, events.EPOCH_OPENED)
_ENDED = (events.FINISHED, events.STOPPED)


@dataclass(frozen=True)
class RankInterval:
    """The interval during which a worker held a logical rank, in seconds since the first epoch opened; ``is_first``:
    whether the worker got the rank when all workers were started together.
    """

    rank: int
    worker: str
    begin: float
    end: float
    is_first: bool


def origin(history: Sequence[Event]) -> float:
    """Return the wall time at which pictures start: the opening of the first epoch, else the first event, else 0."""
    opened = next((event for event in history if event.name == events.EPOCH_OPENED), None)
    first = opened or (history[0] if history else None)
    return first.wall if first is not None else 0.0


def rank_intervals(history: Sequence[Event], found: Sequence[Recovery]) -> list[RankInterval]:
    """Return all intervals: those that ended during the run, by end, then the last one of each rank.

    An interval that was ended by a fault ends at the time of the fault, not at the opening of the next epoch.
    """
    zero = origin(history)
    held: dict[int, tuple[str, float, bool]] = {}
    done = []
    for event in history:
        if event.name != events.EPOCH_OPENED:
            continue
        at, seats = event.wall - zero, seats_of(event)
        anew = all(worker != held.get(rank, (None,))[0] for rank, worker in seats.items())
        for rank, worker in seats.items():
            before = held.get(rank)
            if before is not None and before[0] == worker:
                continue
            if before is not None:
                end = max(before[1], _interrupted(event, found) - zero)
                done.append(RankInterval(rank, before[0], before[1], end, before[2]))
            held[rank] = (worker, at, anew)
    last = max((event.wall for event in history), default=zero) - zero
    return done + [
        RankInterval(rank, worker, begin, last, first) for rank, (worker, begin, first) in sorted(held.items())
    ]


def _interrupted(opened: Event, found: Sequence[Recovery]) -> float:
    """Return the wall time at which the epoch before ``opened`` was interrupted."""
    times = [
        r.began.wall for r in found if r.began.wall <= opened.wall and (not r.ended or opened.wall <= r.ended.wall)
    ]
    return times[-1] if times else opened.wall


def end_of_time(history: Sequence[Event], productive: float) -> float:
    """Return the number of seconds that a picture spans.

    A run that has not ended spans at least ``productive`` seconds, the time of its steps, as steps write no events.
    """
    zero = origin(history)
    last = max((event.wall for event in history), default=zero) - zero
    ended = any(event.name in (events.FINISHED, events.STOPPED) for event in history)
    return max(last if ended else max(last, productive), 1e-3)


@dataclass(frozen=True)
class ReplicaInterval:
    """A period in which a replica is in one state, in seconds since ``Record.zero``.

    The states are:
    - ONLINE: the replica contributes gradients to steps.
    - CATCHING_UP: the replica fetches the training state from other replicas, or waits to do so.
    - REBUILDING: the replica's workers and process groups are being started, after a failure or for the first time.
    - OFFLINE: the replica has failed, and its new workers have not been started yet.
    """

    replica: int
    state: str
    begin: float
    end: float


@dataclass(frozen=True)
class _Transition:
    """A transition of a replica to ``state`` at wall time ``at``. It is ignored if the replica is in none of the states
    ``when`` at that time; an empty ``when`` stands for all states.
    """

    at: float
    state: str
    when: tuple[str, ...] = ()


def replica_intervals(record: "Record") -> list[ReplicaInterval]:
    """Return all intervals, by replica and in order of time.

    They end with the last event or the last commit of the run, whichever is later.
    """
    last = [event.wall for _, event in record.history[-1:]] + [step.when for step in record.steps[-1:]]
    found = []
    for replica in range(record.count):
        turns = _reported_transitions(replica, record)
        turns += _committed(replica, record.steps, record.pace.took, [turn.at for turn in turns])
        ordered = sorted(turns, key=lambda turn: turn.at)
        found += _intervals(replica, ordered, record.zero, max(last, default=0.0))
    return found


def _reported_transitions(replica: int, record: "Record") -> list[_Transition]:
    """Return the changes of a replica's state that its own events and the quorum server's events report."""
    own = record.replicas.get(replica)
    found = [turn for event in (own.events if own else ()) if (turn := _of_own(event)) is not None]
    begun = record.steps[0].when if record.steps else float("inf")
    found += [turn for _, event in record.history if (turn := _of_server(replica, event, begun)) is not None]
    return found


def _of_own(event: Event) -> _Transition | None:
    if event.name in _BROKEN:
        return _Transition(event.wall, OFFLINE, (ONLINE, CATCHING_UP))
    if event.name in _BUILT:
        return _Transition(event.wall, REBUILDING, (OFFLINE, _OVER))
    return _Transition(event.wall, _OVER) if event.name in _ENDED else None


def _of_server(replica: int, event: Event, begun: float) -> _Transition | None:
    """Return the transition that a quorum server's event reports for ``replica``, or None.

    ``begun`` is the wall time of the first commit; a replica that joins before it has no training state to fetch.
    """
    if replica_of(event) != replica:
        return None
    if event.name == events.REPLICA_OFFLINE:
        return _Transition(event.wall, OFFLINE, (ONLINE, CATCHING_UP))
    if event.name == events.REPLICA_ONLINE:
        return _Transition(event.wall, CATCHING_UP if event.wall > begun else ONLINE, (REBUILDING, OFFLINE, _OVER))
    return _Transition(event.wall, ONLINE, (CATCHING_UP,)) if event.name == events.CAUGHT_UP else None


def _committed(
    replica: int, steps: Sequence[Step], took: Sequence[float], reported: Sequence[float]
) -> list[_Transition]:
    """Return the transitions of a replica that follow from its part in the committed steps.

    A transition gets the time at which its step began. If an event reports a transition during the step, it gets the
    time at which the step ended.
    """
    found, reported, at, last = [], sorted(reported), 0, _OVER
    for step, seconds in zip(steps, took, strict=True):
        begin, state = step.when - seconds, _part(replica, step)
        while at < len(reported) and reported[at] <= begin:
            at += 1
        is_reported = at < len(reported) and reported[at] <= step.when
        found.append(_Transition(step.when if is_reported else begin, state, _proven(state, last, is_reported)))
        last = state
    return found


def _proven(state: str, last: str, is_reported: bool) -> tuple[str, ...]:
    """Return the states that a commit may change to ``state``, an empty tuple for all; ``last``: the state by the
    previous commit; ``is_reported``: whether an event reports a transition during this step.
    """
    # A commit without the replica does not show that it is offline: it may be rebuilding or waiting to join.
    if state == OFFLINE:
        return (ONLINE, CATCHING_UP) if last == CATCHING_UP and not is_reported else (ONLINE,)
    if not is_reported:
        return ()
    return (CATCHING_UP,) if state == ONLINE else (REBUILDING, OFFLINE, _OVER)


def _part(replica: int, step: Step) -> str:
    if replica in step.commit.healthy:
        return ONLINE
    return CATCHING_UP if replica in step.commit.behind else OFFLINE


def _intervals(replica: int, turns: Sequence[_Transition], zero: float, end: float) -> list[ReplicaInterval]:
    found: list[ReplicaInterval] = []
    state, since = _OVER, zero

    def leave(at: float) -> None:
        if state == _OVER or at <= since:
            return
        begin = since
        if found and found[-1].state == state and found[-1].end == since - zero:  # merge with the previous interval
            begin = found.pop().begin + zero
        found.append(ReplicaInterval(replica, state, begin - zero, at - zero))

    for turn in turns:
        if (turn.when and state not in turn.when) or turn.state == state:
            continue
        leave(turn.at)
        state, since = turn.state, max(turn.at, zero)
    leave(end)
    return found


NOTHING = "nothing on record"
_FIX = "give the folder that was given to ft run as --run-dir"


@dataclass(frozen=True)
class ReplicaRecord(run.Run):
    """What the control plane and the workers of one replica have written, and the steps that it committed."""

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
        return goodput(self.metrics, self.events, self.recoveries)

    @cached_property
    def corruption(self) -> Corruption | None:
        return corruption(self.events)


@dataclass(frozen=True)
class Losses:
    """The loss after each step whose loss is known.

    Attributes:
        points: (amount, loss) after each step.
        over: what the amount counts: "step", "tokens" or "samples".
        at: step -> amount at the end of that step.
        marks: (amount, colour) at recoveries, or at failures of replicas.
    """

    points: list[tuple[float, float]]
    over: str
    at: dict[int, float]
    marks: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """The record of a run.

    Attributes:
        replicas: number of a replica -> its record, for the replicas that have a folder.
        has_quorum: whether the run is one of FT-HSDP, with a quorum server and commit logs.
        events: events of the quorum server, in order of time.
    """

    folder: Path
    replicas: dict[int, ReplicaRecord]
    has_quorum: bool
    events: list[Event] = field(default_factory=list)

    @property
    def only(self) -> ReplicaRecord:
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
    def _found(self) -> tuple[StepPace, list[Incident]]:
        return find(self.steps, self.events)

    @property
    def pace(self) -> StepPace:
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
            return effective(self.steps, self.pace, self.incidents, self.count)
        return effective_of_one(self.only.goodput, self.only.recoveries)

    @cached_property
    def zero(self) -> float:
        """Return the wall time at which the relative times of the report start.

        It is the first event or, if earlier, the first step; without FT-HSDP it is the opening of the first epoch.
        """
        if not self.has_quorum:
            return origin(self.only.events)
        times = [event.wall for _, event in self.history[:1]]
        return min(times + [step.when - step.commit.step_s for step in self.steps[:1]], default=0.0)

    @cached_property
    def lanes(self) -> list[ReplicaInterval]:
        """Return when each replica was in which state."""
        return replica_intervals(self)

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
    found = run.replicas(folder) if folder.is_dir() else {}
    if not found:
        return Record(folder, {0: ReplicaRecord(**vars(run.load(folder)))}, has_quorum=False)
    try:
        replicas = {number: _replica(path, most) for number, path in found.items()}
        history = sorted(events.read(folder / run.EVENTS), key=lambda event: event.wall)
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error}", _FIX) from error
    return Record(folder, replicas, True, history)


def _replica(folder: Path, most: int | None) -> ReplicaRecord:
    try:
        own = run.load(folder)
    except UserError:
        own = run.Run(folder)
    return ReplicaRecord(**vars(own), commits=commits.read(folder, most))


def _losses_of_one(only: ReplicaRecord) -> Losses:
    """Return the losses over the steps, with a mark at each step that was redone after a recovery."""
    points = [(m["step"], loss) for m in only.metrics if (loss := number(m, "loss")) is not None]
    marks = [(r.step + 1, palette.OUTCOME[r.outcome]) for r in only.recoveries if r.step is not None]
    steps = {event.step for event in only.events if event.step is not None}
    return Losses(points, "step", {step: step for step in steps}, marks)


def _losses(record: Record) -> Losses:
    """Return the loss of each step by the amount of data trained on, with marks at the failures of replicas.

    The loss of a step is that in the metrics of the first replica that took part in it and has one. The amount counts
    tokens if the metrics tell how many a sample has, else samples.
    """
    metrics = {replica: {m["step"]: m for m in one.metrics} for replica, one in record.replicas.items()}
    length = _tokens_per_sample(metrics)
    points, at, amount = [], {}, 0.0
    for step in record.steps:
        amount += step.commit.batch * len(step.commit.streams) * (length or 1.0)
        at[step.number] = amount
        values = (metrics.get(replica, {}).get(step.number, {}) for replica in sorted(step.by))
        points += [(amount, loss) for each in values if (loss := number(each, "loss")) is not None][:1]
    failures = [one for one in record.of_kind(FAILURE) if one.first in at]
    marks = [(at[f.first], palette.FAULT) for f in failures]
    return Losses(points, "samples" if length is None else "tokens", at, marks)


def _tokens_per_sample(metrics: dict[int, dict[int, dict]]) -> float | None:
    """Return the tokens per sample, computed from a step's tokens per second, seconds and samples, or None."""
    for steps in metrics.values():
        for each in steps.values():
            figures = [number(each, name) for name in ("tokens_per_s", "step_time_s", "global_batch_size")]
            if all(figures):
                return float(round(figures[0] * figures[1] / figures[2]))
    return None
