"""Derive a run's recoveries from its events: what failed, how the failure was classified, and how long each phase took.

The phases follow each other in this order (DEADPOOL, figures 10 and 11, breaks a recovery down similarly):

    detect    from the fault to its detection (known only for faults that were injected)
    release   until the last surviving worker has left the closed epoch
    assemble  until every replacement worker has arrived and the repair is ordered (counted from the end of release)
    rebuild   until process groups are rebuilt on every worker
    restore   until state is in place on every worker
    resume    until the first new step has begun on every worker

A failure during a recovery prolongs that recovery: both count as one recovery with several attempts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft.base import events
from ft.base.events import Event, elapsed
from ft.faults import verdict
from ft.faults.table import HARMLESS, NAMES, UNNOTICED, rows_of

PHASES = ("detect", "release", "assemble", "rebuild", "restore", "resume")
REPLACED, IN_PLACE, RESTART, STOPPED, UNDER_WAY = "replaced", "in place", "restart", "stopped", "under way"

_RESTARTS = (events.RESTARTED, events.CONTROL_RESTARTED)
_ENDS = (events.RESUMED, events.STOPPED, events.FINISHED)
_HARMLESS_KINDS = {kind for kind in NAMES if all(row.outcome in (HARMLESS, UNNOTICED) for row in rows_of(kind))}
"""Kinds of injected faults that interrupt nothing."""


@dataclass(frozen=True)
class SeatChange:
    """A logical rank that is held by another worker after a recovery than before; None: unknown by whom before."""

    rank: int
    before: str | None
    after: str


@dataclass(frozen=True)
class Recovery:
    """One interruption of training and how it ended.

    Attributes:
        outcome: REPLACED (a standby took over), IN_PLACE (the same workers continued), RESTART (from the checkpoint),
            STOPPED (the run ended), or UNDER_WAY (not over yet).
        began: the first event of the recovery, from which phases are measured.
        detected_at: wall time of the first detection or, where none is on record, of the recovery's first event.
        phases: name -> seconds, for the phases that are known, in order.
        total: seconds from ``began`` to ``ended``, None while under way.
        step: the committed step from which training continued, or None.
        steps_redone: steps that were computed again, the interrupted one included; None where unknown.
        deferred: number of process groups that are rebuilt on first use, None where unknown.
        attempts: number of epochs that were opened until training continued, at least 1.
        reason: why training was interrupted, from the gravest fault, or the first event that has a reason or a message.
        stages: the ``stage_rebuilt`` events of the last attempt: pipeline stages recomputed from their neighbours.
        differing: the ``step_differs`` events: ranks on which a step that was done again differs from its first try.
        hosts: node -> host name, for the nodes of the run.
        closed: the epoch that was closed, or None.
        epoch: the epoch in which training continued, or None.
        kept: number of process groups that were kept, None where unknown.
    """

    number: int
    closed: int | None
    epoch: int | None
    outcome: str
    injected: list[Event]
    detected: list[Event]
    began: Event
    detected_at: float
    ended: Event | None
    seats: list[SeatChange]
    phases: dict[str, float]
    total: float | None
    step: int | None
    steps_redone: int | None
    rebuilt: int | None = None
    kept: int | None = None
    deferred: int | None = None
    attempts: int = 1
    reason: str = ""
    stages: list[Event] = field(default_factory=list)
    differing: list[Event] = field(default_factory=list)
    hosts: Mapping[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[Event]:
        """Return the detected faults, the gravest first."""
        return _by_gravity(self.detected)

    @property
    def category(self) -> str:
        return self.of_gravest("category")

    @property
    def signal(self) -> str:
        return self.of_gravest("signal")

    @property
    def headline(self) -> str:
        """Return the reason, with the worker at fault and its node: "n1.w3 on n1 (gpu0137): killed by SIGKILL"."""
        gravest = self.faults[0] if self.detected else None
        if gravest is None or gravest.worker is None or self.signal == verdict.NODE_LOST:
            return self.reason
        node = f" on {events.named(gravest.node, self.hosts)}" if len(self.hosts) > 1 else ""
        return f"{gravest.worker}{node}: {self.reason}"

    def of_gravest(self, key: str) -> str:
        """Return a detail of the gravest fault, "" where it is unknown."""
        return str(self.faults[0].detail.get(key, "")) if self.detected else ""

    @property
    def is_over(self) -> bool:
        """Return whether the recovery is over and training continued."""
        return self.outcome in (REPLACED, IN_PLACE, RESTART)

    @property
    def groups(self) -> int | None:
        """Return the number of all process groups, or None where unknown."""
        return None if self.rebuilt is None else self.rebuilt + (self.kept or 0) + (self.deferred or 0)


def recoveries(history: Sequence[Event]) -> list[Recovery]:
    """Return the recoveries in a run's events, in order; the last one may be under way."""
    found: list[Recovery] = []
    reader = _Reader()
    for event in history:
        found += [_recovery(len(found) + 1, done) for done in reader.take(event)]
    if reader.current is not None:
        found.append(_recovery(len(found) + 1, reader.end()))
    differing = [event for event in history if event.name == events.STEP_DIFFERS]  # they come after a recovery's end
    hosts = events.hosts(history)
    return [replace(each, differing=[e for e in differing if e.epoch == each.epoch], hosts=hosts) for each in found]


def seats_of(event: Event) -> dict[int, str]:
    """Return logical rank -> worker from an ``epoch_opened`` event."""
    seats = event.detail.get("seats")
    found = {}
    for rank, seat in seats.items() if isinstance(seats, dict) else ():
        worker = seat.get("worker") if isinstance(seat, dict) else seat
        if str(rank).isdecimal() and worker is not None:
            found[int(rank)] = str(worker)
    return found


@dataclass
class _Open:
    """A recovery whose events are still being collected.

    Attributes:
        seats_before: logical rank -> worker before the recovery.
    """

    seats_before: dict[int, str]
    injected: list[Event] = field(default_factory=list)
    detected: list[Event] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def last(self, name: str) -> Event | None:
        """Return the last event called ``name`` so far, or None."""
        return next((event for event in reversed(self.events) if event.name == name), None)

    def first(self, name: str) -> Event | None:
        """Return the first event called ``name`` so far, or None."""
        return next((event for event in self.events if event.name == name), None)

    @property
    def restarted(self) -> Event | None:
        """Return the last event that orders a restart from the checkpoint, or None.

        A restart of the control plane counts as such an order.
        """
        return next((event for event in reversed(self.events) if event.name in _RESTARTS), None)

    @property
    def reopened(self) -> Event | None:
        """Return the opening of the first epoch after a warm restart."""
        if self.restarted is None:
            return None
        later = self.events[self.events.index(self.restarted) + 1 :]
        return next((event for event in later if event.name == events.EPOCH_OPENED), None)

    @property
    def ended(self) -> Event | None:
        """Return the event with which training resumed or the run ended, or None."""
        last = self.events[-1]
        if last.name in (events.RESUMED, events.STOPPED):
            return last
        if last.name == events.FINISHED and self.restarted is None:
            return self.last(events.STATE_RESTORED) or self.events[-2]
        return self.reopened


class _Reader:
    """Reads the events of a run one by one and groups them into recoveries."""

    def __init__(self):
        self.current: _Open | None = None
        self._seats: dict[int, str] = {}
        self._injected: list[Event] = []
        self._detected: list[Event] = []

    def take(self, event: Event) -> list[_Open]:
        """Process the next event; return the recoveries that it completes."""
        done = [self.end()] if self._comes_after_restart(event) else []
        if event.name == events.FAULT_INJECTED:
            self._injected.append(event)
        elif event.name == events.FAULT_DETECTED and _concerns_training(event):
            (self.current.detected if self.current else self._detected).append(event)
        elif self.current is None and self._begins(event):
            self.current = _Open(dict(self._seats), detected=self._detected)
            self._detected = []
        if event.name == events.EPOCH_OPENED:
            self._seats = seats_of(event)
        if self.current is not None:
            self.current.events.append(event)
            if event.name in _ENDS:
                done.append(self.end())
        return done

    def _begins(self, event: Event) -> bool:
        if event.name == events.STOPPED:
            return bool(self._detected)
        return event.name == events.EPOCH_CLOSED or event.name in _RESTARTS

    def _comes_after_restart(self, event: Event) -> bool:
        """Return whether ``event`` follows a restart that is complete.

        A restarted run may train without reporting that it has resumed, so a restart counts as complete when the first
        epoch after it opens.
        """
        begins = event.name in (events.FAULT_DETECTED, events.EPOCH_CLOSED, *_RESTARTS)
        return begins and self.current is not None and self.current.reopened is not None

    def end(self) -> _Open:
        """Return the current recovery with the events collected so far; the next event may begin another recovery."""
        done, self.current = self.current, None
        done.injected = _causes(self._injected, done)
        last = max((fault.wall for fault in done.injected), default=None)
        # Faults that were injected before the cause of this interruption, without effect, will not cause a later one.
        self._injected = [f for f in self._injected if last is None or f.wall > last]
        return done


def _concerns_training(event: Event) -> bool:
    """Return whether a detected fault interrupts training; the death of a standby does not."""
    return event.rank is not None or event.worker is None


def _causes(injected: list[Event], read: _Open) -> list[Event]:
    """Return those of the faults injected so far that caused this interruption."""
    if read.last(events.CONTROL_RESTARTED) is not None:
        return [f for f in injected if f.detail.get("kind") == "kill-control"][-1:]
    may = [f for f in injected if f.detail.get("kind") not in {*_HARMLESS_KINDS, "kill-control"}]
    ranks = {event.rank for event in read.detected if event.rank is not None}
    nodes = {event.node for event in read.detected if event.node is not None}
    direct = [f for f in may if _victim(f) in ranks or (_victim(f) is None and f.node in nodes)]
    if direct:
        # Keep only the last fault of each victim: earlier faults (such as a short hang) had no consequence.
        return list({(_victim(f), f.node): f for f in direct}.values())
    # A connection breaks at both ends, and the healthy end may report the failure first.
    closed = [event for event in read.events if event.name == events.EPOCH_CLOSED] or read.detected
    epoch = closed[0].epoch if closed else None
    return [f for f in may if f.epoch in (None, epoch)][-1:]


def _victim(fault: Event) -> int | None:
    return fault.rank if fault.rank is not None else fault.detail.get("rank")


def _recovery(number: int, read: _Open) -> Recovery:
    ended = read.ended
    first_detected = read.detected[0] if read.detected else read.events[0]
    causes = [fault for fault in read.injected if fault.wall <= first_detected.wall + 1.0]
    began = min(causes, key=lambda fault: fault.wall) if causes else first_detected
    opened, groups, state = (read.last(n) for n in (events.EPOCH_OPENED, events.GROUPS_REBUILT, events.STATE_RESTORED))
    seats = _changes(read.seats_before, seats_of(opened)) if opened is not None else []
    step = ended.step if ended is not None and ended.name == events.RESUMED else None
    if step is None and state is not None:
        step = state.step
    closed = read.first(events.EPOCH_CLOSED)
    return Recovery(
        number=number,
        closed=closed.epoch if closed is not None else None,
        epoch=opened.epoch if opened is not None else None,
        outcome=_outcome(read, ended, seats),
        injected=read.injected,
        detected=read.detected,
        began=began,
        detected_at=first_detected.wall,
        ended=ended,
        seats=seats,
        phases=_phases(read, began, first_detected, ended),
        total=elapsed(began, ended) if ended is not None else None,
        step=step,
        steps_redone=_redone(read, step),
        rebuilt=_of(groups, "rebuilt"),
        kept=_of(groups, "kept"),
        deferred=_of(groups, "deferred"),
        attempts=max(1, sum(event.name == events.EPOCH_OPENED for event in read.events)),
        reason=_reason(read),
        stages=[
            e for e in read.events if e.name == events.STAGE_REBUILT and opened is not None and e.epoch == opened.epoch
        ],
    )


def _outcome(read: _Open, ended: Event | None, seats: list[SeatChange]) -> str:
    if ended is None:
        return UNDER_WAY
    if ended.name == events.STOPPED:
        return STOPPED
    if read.restarted is not None:
        return RESTART
    return REPLACED if seats else IN_PLACE


def _reason(read: _Open) -> str:
    for event in (
        *_by_gravity(read.detected),
        read.first(events.EPOCH_CLOSED),
        read.restarted,
        read.last(events.STOPPED),
    ):
        text = event is not None and (event.detail.get("reason") or event.detail.get("message"))
        if text:
            return str(text)
    return ""


def _by_gravity(detected: Sequence[Event]) -> list[Event]:
    def gravity(event: Event) -> tuple[int, int]:
        return verdict.gravity(str(event.detail.get("action", "")), str(event.detail.get("signal", "")))

    return sorted(detected, key=gravity, reverse=True)


def _changes(before: dict[int, str], after: dict[int, str]) -> list[SeatChange]:
    changed = (SeatChange(rank, before.get(rank), worker) for rank, worker in sorted(after.items()))
    return [change for change in changed if change.before != change.after]


def _phases(read: _Open, began: Event, detected: Event, ended: Event | None) -> dict[str, float]:
    """Return phase -> seconds; if the event that ends a phase is missing, its time counts for the next phase."""
    marks: list[tuple[str, float]] = []
    if began is not detected:
        marks.append(("detect", elapsed(began, detected)))
    released = read.first(events.RELEASED)
    repair, resumed = read.last(events.REPAIR_ORDERED), ended
    if released is not None:
        marks.append(("release", elapsed(began, released)))
    if repair is not None:
        marks.append(("assemble", elapsed(began, repair)))
    elif read.restarted is not None and ended is not None:
        return _differences([*marks, ("resume", elapsed(began, ended))])
    groups, state = read.last(events.GROUPS_REBUILT), read.last(events.STATE_RESTORED)
    repaired = [elapsed(began, event) for event in (groups, state) if event is not None]
    if repaired:
        start = marks[-1][1] if marks else 0.0
        # Both events are written when groups and state are restored; the event's details hold the groups' own seconds.
        rebuild = _of(groups, "seconds")
        if isinstance(rebuild, int | float):
            marks.append(("rebuild", min(start + rebuild, max(repaired))))
        marks.append(("restore", max(repaired)))
    if resumed is not None:
        marks.append(("resume", elapsed(began, resumed)))
    return _differences(marks)


def _differences(marks: list[tuple[str, float]]) -> dict[str, float]:
    found, reached = {}, 0.0
    for name, at in marks:
        found[name] = max(0.0, at - reached)
        reached = max(reached, at)
    return found


def _redone(read: _Open, step: int | None) -> int | None:
    """Return how many steps are computed a second time, the interrupted step included; None where unknown."""
    if step is None:
        return None
    if not read.detected and read.restarted is not None:
        return None
    committed = [event.step for event in (*read.detected, read.first(events.EPOCH_CLOSED)) if event and event.step]
    released = read.first(events.RELEASED)
    if released is not None:
        committed += [s for s in released.detail.get("steps", []) if isinstance(s, int)]
    return max(1, max(committed, default=step) - step)


def _of(event: Event | None, key: str) -> Any:
    return event.detail.get(key) if event is not None else None
