"""Reactions of the quorum server to messages and to the passing of time, as updates of its state.

The functions do no I/O and read no clock: ``now`` is the server's monotonic time in seconds. Each returns the events to
be logged. A replica is aside while it does something that takes longer than a step, such as saving a checkpoint.
"""

from dataclasses import replace

from ft.base import events
from ft.base.events import Note
from ft.job.quorum import decide
from ft.job.quorum.state import (
    ARRIVING,
    EXPECTED,
    HERE,
    LOST,
    OFFLINE,
    QuorumState,
    heard_of,
    started,
)
from ft.job.quorum.values import NoQuorum, Quorum, Report

_OWN_PAUSE_BEATS = 4
"""The server checks the clock at every heartbeat interval; a gap of more than this many intervals is a pause of its
own.
"""


def hello(state: QuorumState, now: float, replica: int, life: int, last: Quorum | None, steps: int = 0) -> list[Note]:
    """Register a leader that has connected for the first time or again.

    ``last`` is the last quorum that this leader received, or None; ``steps`` the number of committed steps in the state
    that its life began with.

    Raises:
        NoQuorum: this life is over: a later life has connected, or the end of this life was reported.
    """
    one = state.of(replica)
    if life < one.life:
        raise NoQuorum(f"life {life} of replica {replica} is over: life {one.life} has connected")
    if life <= one.over:
        raise NoQuorum(f"life {life} of replica {replica} is over: {one.reason}")
    notes = _ended(state, replica, f"life {life} takes its place") if life > one.life else []
    if life > one.life:
        started(one, life, now)
    one.steps = max(one.steps, steps)
    if one.phase == ARRIVING:
        one.waited_s = 0.0
    if one.phase != HERE:
        one.becomes(HERE, now, "its leader is connected")
    # A replica that was aside remains so until its next report, whichever connection brings it.
    one.heard_at, one.answered = now, None
    one.is_online |= last is not None  # it has reconnected to a new server: no event
    heard_of(state, now, last, 0)
    return notes


def report(state: QuorumState, now: float, given: Report) -> list[Note]:
    """Register a leader's report, which asks for the next quorum.

    Raises:
        NoQuorum: this life is over, or has sent no hello.
    """
    one = state.of(given.replica)
    if given.life != one.life or one.phase != HERE:
        raise NoQuorum(f"life {given.life} of replica {given.replica} is not connected: life {one.life} is {one.phase}")
    one.heard_at, one.step_s = now, given.step_s
    if given in (one.report, one.answered):  # a duplicate, sent when a connection began just as the report was made
        return []
    one.report, one.reported_at, one.steps, one.is_aside = given, now, given.next_step, False
    state.highest = max(state.highest, given.number, given.lineage)
    if given.finished:
        one.has_finished, state.end = True, max(state.end or given.state, given.state)
    if one.is_online:
        return []
    one.is_online = True
    return [Note(events.REPLICA_ONLINE, {"replica": given.replica, "life": given.life, "step": given.next_step})]


def aside(state: QuorumState, now: float, replica: int) -> None:
    """Note that ``replica`` is aside: its next report will take longer than a step does."""
    one = state.of(replica)
    one.heard_at, one.is_aside = now, True


def repairs(state: QuorumState, now: float, replica: int, life: int) -> None:
    """Note that life ``life`` of ``replica`` has lost a worker, and returns as a later life with its own state."""
    one = state.of(replica)
    if life == one.life and not one.has_finished and one.repairs_since is None:
        one.repairs_since = now


def repaired(state: QuorumState, replica: int) -> None:
    """Note that ``replica`` has replaced its lost worker, or can no longer do so."""
    state.of(replica).repairs_since = None


def beat(state: QuorumState, now: float, replica: int) -> None:
    """Note a heartbeat of a leader's client."""
    state.of(replica).heard_at = now


def lost(state: QuorumState, now: float, replica: int, life: int) -> None:
    """Note that the connection of a leader broke."""
    one = state.of(replica)
    if life == one.life and one.phase == HERE:
        one.becomes(LOST, now, "the connection to its leader broke")


def leaves(state: QuorumState, now: float, replica: int, life: int, reason: str) -> list[Note]:
    """Note that a leader has ended its life, normally or because it gave up."""
    one = state.of(replica)
    if life != one.life:
        return []
    one.becomes(OFFLINE, now, reason)
    one.over = life
    return _ended(state, replica, reason)


def given_up(state: QuorumState, now: float, replica: int, life: int, reason: str) -> list[Note]:
    """Note that life ``life`` of ``replica`` is over and that no other life is to come."""
    one = state.of(replica)
    if life < one.life or one.has_finished:
        return []
    if life > one.life:
        started(one, life, now)
    one.becomes(OFFLINE, now, reason)
    one.over, one.is_given_up = life, True
    return _ended(state, replica, reason)


def arriving(state: QuorumState, now: float, replica: int, life: int) -> list[Note]:
    """Note that processes of life ``life`` of ``replica`` have started.

    The processes send this message to every new server, possibly long after that life has connected; such a repetition
    is ignored.
    """
    one = state.of(replica)
    if life <= max(one.life, one.over):
        return []
    notes = _ended(state, replica, "it begins anew")
    started(one, life, now)
    one.becomes(ARRIVING, now, "its processes have begun")
    return notes


def formed(state: QuorumState, now: float, quorum: Quorum, excluded: dict[int, str]) -> list[Note]:
    """Apply a quorum that was decided.

    Answers the reports of its members, and excludes the replicas in ``excluded`` (replica -> reason) for a time.
    """
    state.highest = max(state.highest, quorum.number)
    if quorum.finished:
        for number in quorum.members:
            answered(state, number)
        return []
    last, waiting = state.last, [state.of(number).reported_at for number in quorum.members]
    is_same = last is not None and last.lives == quorum.lives and not last.load
    is_retry = is_same and last is not None and quorum.step == last.step
    state.failed = state.failed + 1 if is_retry else 0
    _account(state, now, quorum, excluded, min(waiting))
    state.last, state.formed_at = quorum, now
    if is_same and not is_retry:
        return []
    values = {"number": quorum.number, "step": quorum.step, "healthy": list(quorum.healthy)}
    values |= {"behind": list(quorum.behind), "reason": quorum.reason, "wait_s": round(now - min(waiting), 4)}
    return [Note(events.QUORUM_FORMED, values)]


def time_passed(state: QuorumState, now: float) -> list[Note]:
    """Mark replicas as offline whose connections have been broken for ``lost_s``."""
    limits, notes = state.options.limits, []
    _forgive_own_pause(state, now)
    for number, one in sorted(state.replicas.items()):
        if one.phase == LOST and now - one.since >= limits.lost_s:
            one.becomes(OFFLINE, now, one.reason)
            one.is_cut_off = True
            notes += _ended(state, number, one.reason)
    return notes


def _forgive_own_pause(state: QuorumState, now: float) -> None:
    """Shift all timestamps by the time for which this server itself was paused, so that no replica counts as
    silent or late.
    """
    pause, state.looked_at = now - state.looked_at, now
    if pause <= _OWN_PAUSE_BEATS * state.options.limits.beat_s:
        return
    state.formed_at = min(now, state.formed_at + pause)
    state.began_at = min(now, state.began_at + pause)
    for one in state.replicas.values():
        one.heard_at = min(now, one.heard_at + pause)
        one.since = min(now, one.since + pause)
        one.reported_at = min(now, one.reported_at + pause)


def answered(state: QuorumState, replica: int) -> None:
    """Note that the pending report of ``replica`` was answered."""
    one = state.of(replica)
    one.answered, one.report = one.report, None


def _account(state: QuorumState, now: float, quorum: Quorum, excluded: dict[int, str], began: float) -> None:
    """Update exclusions, and the time that the others have waited for replicas that are arriving."""
    ban_s = state.options.limits.calibrated(state.step_s()).ban_s
    for number, one in state.replicas.items():
        if number in excluded:
            one.ban = decide.longer(one.ban, now, ban_s, state.options.limits.ban_most_s)
        elif number in quorum.lives:
            one.answered, one.report, one.waited_s = one.report, None, 0.0
            if number in quorum.healthy and now - one.ban.until > one.ban.length_s:
                one.ban = replace(one.ban, times=0)
        elif one.phase in (HERE, ARRIVING):
            one.waited_s += max(0.0, now - max(began, one.since))


def _ended(state: QuorumState, replica: int, reason: str) -> list[Note]:
    one = state.of(replica)
    if one.phase == EXPECTED or not one.is_online:
        return []
    one.is_online = False
    return [Note(events.REPLICA_OFFLINE, {"replica": replica, "reason": reason})]
