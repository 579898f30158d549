"""Compute from the record of an FT-HSDP run when each replica was online, catching up, rebuilding, or offline.

A replica is a full copy of the model with its own workers. The quorum server determines which replicas take part in
each step. The sources are the event logs of the replicas and of the quorum server, and the replicas' commit logs, which
list for each committed step the replicas that contributed. The result is the lanes of the run's timeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ft.base import events
from ft.base.events import Event
from ft.observe.hsdp.lineage import Step
from ft.observe.hsdp.record import Record, replica_of

ONLINE, CATCHING_UP, REBUILDING, OFFLINE = "online", "catching up", "rebuilding", "offline"
STATES = (ONLINE, CATCHING_UP, REBUILDING, OFFLINE)
_OVER = ""

_BROKEN = (events.FAULT_DETECTED, events.EPOCH_CLOSED)
_BUILT = (events.RUN_STARTED, events.WORKER_STARTED, events.EPOCH_OPENED)
_ENDED = (events.FINISHED, events.STOPPED)


@dataclass(frozen=True)
class Lane:
    """A period in which a replica is in one state.

    Attributes:
        replica: number of the replica.
        state: ONLINE, CATCHING_UP, REBUILDING or OFFLINE.
        begin: beginning of the period, in seconds since ``origin``.
        end: end of the period, in seconds since ``origin``.

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


def origin(record: Record, steps: Sequence[Step]) -> float:
    """Return the wall time at which the lanes start: the first event or, if earlier, the first step."""
    times = [event.wall for _, event in record.history[:1]]
    times += [step.when - step.commit.step_s for step in steps[:1]]
    return min(times, default=0.0)


def last_moment(record: Record, steps: Sequence[Step]) -> float:
    """Return the wall time at which the lanes end: that of the last event or of the last commit, whichever is later."""
    times = [event.wall for _, event in record.history[-1:]]
    return max(times + [step.when for step in steps[-1:]], default=0.0)


def lanes(record: Record, steps: Sequence[Step], took: Sequence[float]) -> list[Lane]:
    """Return all lanes, by replica and in order of time.

    Args:
        record: the run's record.
        steps: the steps whose commits are part of the surviving state (:mod:`ft.observe.hsdp.lineage`).
        took: duration of each step in seconds.
    """
    zero, end = origin(record, steps), last_moment(record, steps)
    found = []
    for replica in range(record.count):
        turns = _reported_transitions(replica, record, steps)
        turns += _committed(replica, steps, took, [turn.at for turn in turns])
        found += _lanes(replica, sorted(turns, key=lambda turn: turn.at), zero, end)
    return found


def _reported_transitions(replica: int, record: Record, steps: Sequence[Step]) -> list[_Transition]:
    """Return the changes of a replica's state that its own events and the quorum server's events report."""
    own = record.replicas.get(replica)
    found = [turn for event in (own.events if own else ()) if (turn := _of_own(event)) is not None]
    begun = steps[0].when if steps else float("inf")
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
        replica: number of the replica.
        steps: the committed steps, in order.
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


def _lanes(replica: int, turns: Sequence[_Transition], zero: float, end: float) -> list[Lane]:
    found: list[Lane] = []
    state, since = _OVER, zero

    def leave(at: float) -> None:
        if state == _OVER or at <= since:
            return
        begin = since
        if found and found[-1].state == state and found[-1].end == since - zero:  # merge with the previous lane
            begin = found.pop().begin + zero
        found.append(Lane(replica, state, begin - zero, at - zero))

    for turn in turns:
        if (turn.when and state not in turn.when) or turn.state == state:
            continue
        leave(turn.at)
        state, since = turn.state, max(turn.at, zero)
    leave(end)
    return found
