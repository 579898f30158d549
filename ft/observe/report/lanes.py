"""Compute the lanes of a run's timeline: which worker held which logical rank, and which state each replica was in.

The workers' lanes follow from the epochs. The replicas' lanes (with FT-HSDP) follow from the event logs of the replicas
and of the quorum server, and from the replicas' commit logs, which list for each committed step the replicas that
contributed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft.base import events
from ft.base.events import Event
from ft.observe.report.lineage import Step, replica_of
from ft.record.recoveries import Recovery, seats_of

if TYPE_CHECKING:
    from ft.observe.report.record import Record

ONLINE, CATCHING_UP, REBUILDING, OFFLINE = "online", "catching up", "rebuilding", "offline"
STATES = (ONLINE, CATCHING_UP, REBUILDING, OFFLINE)
_OVER = ""

_BROKEN = (events.FAULT_DETECTED, events.EPOCH_CLOSED)
_BUILT = (events.RUN_STARTED, events.WORKER_STARTED, events.EPOCH_OPENED)
_ENDED = (events.FINISHED, events.STOPPED)


@dataclass(frozen=True)
class RankInterval:
    """The interval during which a worker held a logical rank.

    Attributes:
        begin: seconds from the opening of the first epoch to the start of the interval.
        end: seconds from the opening of the first epoch to the end of the interval.
        is_first: whether the worker got the rank when all workers were started together.
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
    """A period in which a replica is in one state.

    Attributes:
        state: ONLINE, CATCHING_UP, REBUILDING or OFFLINE.
        begin: beginning of the period, in seconds since ``first_moment``.
        end: end of the period, in seconds since ``first_moment``.

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


def first_moment(history: Sequence[tuple[int | None, Event]], steps: Sequence[Step]) -> float:
    """Return the wall time at which the lanes of replicas start: the first event or, if earlier, the first step."""
    times = [event.wall for _, event in history[:1]]
    times += [step.when - step.commit.step_s for step in steps[:1]]
    return min(times, default=0.0)


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

    Args:
        took: duration of each step, in seconds.
        reported: wall times of the transitions that events report.
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
    """Return the states that a commit may change to ``state``; an empty tuple stands for all states.

    Args:
        state: state of the replica according to this commit.
        last: state of the replica according to the previous commit.
        is_reported: whether an event reports a transition of the replica during this step.
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
