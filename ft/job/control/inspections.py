"""Inspections of all workers when a run seems to hang: orders them, collects the answers and finds the cause in these.

An inspection is ordered shortly before a time limit passes, because the recovery that follows ends the hanging
operations and kills the workers at fault. So it delays a recovery by little. What follows from the answers keeps
workers from being killed that only wait for others. :class:`InspectionAnswers` stands before the decision function: the
answers are long, so the journal gets only what follows from them (``HangJudged``). A new control plane knows nothing of
an inspection of the one before it.
"""

import contextlib
import queue
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ft.base import events, threads
from ft.base.errors import UserError
from ft.faults.hang.causes import BUSY, DEAD_RANK, STOPPED_RANK, over_time
from ft.faults.hang.format import Who
from ft.faults.hang.inspection import Inspection
from ft.job import messages as m
from ft.job.control.state import ControlState, Decisions
from ft.job.parts import HangCause
from ft.record import inspections

AT_WORK = (BUSY, DEAD_RANK, STOPPED_RANK)
"""Kinds of causes whose ranks are in no operation. Ranks of all other causes wait, too, and can go on in place."""

LEAD_S = 0.5
"""Seconds before the end of a time limit at which the inspection is ordered. The answers take some milliseconds."""
_AGAIN_S = 5.0
"""Seconds within which no second inspection of the same epoch is taken by itself."""


def order(state: ControlState, now: float, why: str, out: Decisions, *, asked: bool = False) -> None:
    """Order an inspection, unless one was taken just before; what a person has asked for (``asked``) is always
    ordered."""
    is_recent = state.inspected_in == state.epoch and now - state.inspected_at < _AGAIN_S
    if not state.seats or (is_recent and not asked):
        return
    state.inspected_at, state.inspected_in, state.inspections = now, state.epoch, state.inspections + 1
    state.inspection_why = "" if asked else why
    seats = dict(sorted(state.seats.items()))
    out.add(f"inspection {state.inspections} of all workers: {why}", m.Inspect(state.inspections, why, seats))
    out.note(
        events.INSPECTED, epoch=max(state.epoch, 0), step=state.newest_step(), number=state.inspections, reason=why
    )


def wanted(state: ControlState, now: float, report: m.InspectionWanted, out: Decisions) -> None:
    """Handle a person's wish for an inspection."""
    if state.attached and state.seats:
        order(state, now, report.why, out, asked=True)
    else:
        out.add("ignored: an inspection is wanted, and no worker holds a logical rank")


# --- what follows from an inspection ----------------------------------------------------------------------------------


def taken(state: ControlState, now: float, report: m.InspectionAnswered, out: Decisions) -> None:
    """Record that a node has answered an inspection; ``ft.job.control.inspections`` has its answer."""
    out.add(f"{report.node} has answered inspection {report.number}")


def judged(state: ControlState, now: float, report: m.HangJudged, out: Decisions) -> None:
    """Store what an inspection says of a hang."""
    state.judged = report
    out.add(f"inspection {report.number}: " + (report.causes[0].why if report.causes else "nobody is at fault"))


def is_awaited(state: ControlState, now: float) -> bool:
    """Return whether what the last inspection says is not known yet, and worth waiting for."""
    is_open = state.inspected_in == state.epoch and now - state.inspected_at <= state.options.timeouts.inspection_s
    return is_open and finding(state) is None


def finding(state: ControlState) -> m.HangJudged | None:
    """Return what the last inspection of the present epoch says of a hang, None if nothing is known."""
    found = state.judged
    is_last = found is not None and found.number == state.inspections and state.inspected_in == state.epoch
    return found if is_last else None


def waits(found: m.HangJudged | None, rank: int | None) -> bool:
    """Return whether a rank only waits for others, by what an inspection says."""
    return found is not None and rank in found.waiting and rank not in at_work(found)


def at_work(found: m.HangJudged | None) -> set[int]:
    """Return the ranks that others wait for and that wait for nobody, by what an inspection says."""
    causes = [] if found is None else found.causes
    return {rank for cause in causes if cause.kind in AT_WORK for rank in cause.ranks}


class InspectionAnswers:
    """Collects what workers answer when they are asked what they are doing, and then searches for the cause of a hang.

    The search has a thread of its own, because it takes time in a large run.
    """

    def __init__(self, folder: Path):
        self._folder, self._number = folder, 0
        self._said: dict[str, Mapping[str, Any]] = {}
        self._found: queue.SimpleQueue[m.HangJudged] = queue.SimpleQueue()

    def take(self, state: ControlState, report: m.InspectionAnswered) -> None:
        """Take a node's answer. When all nodes with seats have answered the last inspection, the search begins."""
        if report.number != state.inspections:
            return
        if report.number != self._number:
            self._number, self._said = report.number, {}
        self._said[report.node] = report.said
        if {worker.node for worker in state.seated()} <= self._said.keys():
            said, self._said = list(self._said.values()), {}
            try:
                threads.start(self._judge, (report.number, said), "ft-hang")
            except OSError as error:
                print(f"ft: inspection {report.number} is no evidence: {error.strerror}", flush=True)

    def found(self) -> Iterator[m.HangJudged]:
        """Yield what was found since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()

    def _judge(self, number: int, said: Iterable[Mapping[str, Any]]) -> None:
        try:
            seen = inspections.of_parts(self._folder, said)
        except UserError as error:
            print(f"ft: inspection {number} is no evidence: {error}", flush=True)
            return
        self._found.put(judge(number, seen))


def judge(number: int, seen: Inspection) -> m.HangJudged:
    """Return what an inspection says of a hang. Of a replica's inspection, only its own ranks are named."""
    found, who = over_time([seen]), Who(seen)
    causes = [
        HangCause(
            sorted(_own(seen, cause.guilty)),
            cause.kind,
            f"{cause.kind}: {who.title(cause.guilty)}: {cause.where if cause.kind == BUSY else cause.evidence[0]}",
        )
        for cause in found.causes
    ]
    return m.HangJudged(number, causes, sorted(_own(seen, {rank for wait in found.waiting for rank in wait.ranks})))


def _own(seen: Inspection, ranks: Collection[int]) -> set[int]:
    if not seen.places:
        return set(ranks)
    return {place.rank for rank in ranks if (place := seen.places.get(rank)) is not None and place.replica == seen.home}
