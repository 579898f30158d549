"""Solve phases 2 and 3 of DMR planning exactly, as a mixed-integer linear program, for small pipeline stages.

DMR (dual modular redundancy, SpareTrain) verifies operators by executing them a second time. The planner moves these
second executions to *windows*, times in which a stage communicates or is idle: in phase 2 as *AGC segments*, sequences
of operators that are executed again as a whole, and in phase 3 as single operators.

The solution puts as much verification time into windows as time and memory allow. A longer window or a larger budget
therefore never gives a worse solution, whereas a greedy planner only almost always has this property. The exact
solution is also the reference by which the greedy planner is measured.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ft.systems.dmr.plan.agc import Candidate, Graph, blocks
from ft.systems.dmr.plan.assign import AgcSegment
from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import INTER

MOST_COLUMNS, MOST_NODES = 400, 200
"""Number of variables (choices of a window for an operator or a segment, and kept tensors) up to which a stage is
solved exactly, and number of branch-and-bound nodes after which the solver gives up. Both keep the solver within about
a second, with the same result on any machine."""


@dataclass(frozen=True)
class _Column:
    """A variable of the program, which is 1 if the operators of ``candidate`` are verified in window number ``slot``.

    Attributes:
        candidate: an AGC segment or a single operator.
        slot: number of the window in ``Draft.windows``.
        segment: True if the candidate is an AGC segment.
    """

    candidate: Candidate
    slot: int
    segment: bool


def exact(draft: Draft) -> bool:
    """Assign the operators that phase 1 has left unassigned so that windows contain as much verification as possible.

    Return False, with nothing assigned, if the stage is too large or the solver gives up.
    """
    columns = []
    for column in _columns(draft):
        columns.append(column)
        if len(columns) > MOST_COLUMNS:
            return False
    if not columns:
        return True
    rows = _Rows(len(columns))
    _each_once(rows, columns)
    _within_windows(rows, columns, draft)
    _within_memory(rows, columns, draft)
    if rows.width > MOST_COLUMNS:
        return False
    gains = [sum(op.check_us for op in column.candidate.ops) for column in columns]
    weights = np.concatenate((-np.array(gains), np.zeros(rows.width - len(columns))))
    binary = np.concatenate((np.ones(len(columns)), np.zeros(rows.width - len(columns))))
    with _silence():
        found = milp(
            weights,
            constraints=rows.constraint(),
            integrality=binary,
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 0, "node_limit": MOST_NODES},
        )
    if not found.success:
        return False
    for i in np.flatnonzero(found.x[: len(columns)] > 0.5):
        _take(draft, columns[i], int(i))
    return True


@contextmanager
def _silence() -> Iterator[None]:
    """Return a context in which file descriptor 1 (standard output) is discarded. The solver (HiGHS) prints to it
    whatever its options are, and the caller may print JSON there."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        # Flush C's buffers while output is discarded; otherwise their contents would be printed later.
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _columns(draft: Draft) -> Iterator[_Column]:
    graph = Graph(draft.ops)
    usable = [slot for slot, window in enumerate(draft.windows) if not window.dynamic]
    between = [slot for slot in usable if draft.windows[slot].kind in INTER]
    for op in draft.ops:
        if draft.open(op):
            alone = Candidate((op,), op.check_us, 0.0, op.tensors)
            yield from _placed(draft, alone, usable, False)
    for runs in blocks(draft).values():
        for run in runs:
            for first in range(len(run)):
                for last in range(first, len(run)):
                    ops = tuple(run[first : last + 1])
                    for candidate in (graph.kept(ops) if len(ops) > 1 else None, graph.regenerated(ops)):
                        if candidate is not None:
                            yield from _placed(draft, candidate, between, True)


def _placed(draft: Draft, candidate: Candidate, slots: list[int], segment: bool) -> Iterator[_Column]:
    span = candidate.span(draft)
    for slot in slots:
        if draft.has_time(slot, candidate.load_us) and draft.within(slot, *span):
            yield _Column(candidate, slot, segment)


def _take(draft: Draft, column: _Column, number: int) -> None:
    """Apply a choice of the solver, unless time or memory does not suffice: the solver's tolerances may be wider than
    those of the draft."""
    candidate, slot = column.candidate, column.slot
    if not column.segment:
        draft.defer(candidate.ops[0], slot)
    elif draft.has_time(slot, candidate.load_us) and draft.holdings.fits(candidate.tensors, slot):
        ids = tuple(op.id for op in candidate.ops)
        costs = (candidate.load_us, candidate.regenerated_us)
        name = f"agc:{number}@{draft.stage}"
        draft.defer_segment(AgcSegment(name, ids, draft.windows[slot].id, candidate.tensors, *costs), slot)


class _Rows:
    """The inequalities of the linear program, collected one by one.

    Each inequality is divided by its largest factor, because the solver's tolerances are absolute, and some
    inequalities are in bytes and others in microseconds.

    Args:
        width: number of columns, the variables that exist at the beginning.
    """

    def __init__(self, width: int):
        self.width = width
        self._entries: list[tuple[int, int, float]] = []
        self._below: list[float] = []

    def variable(self) -> int:
        """Add a variable beside the columns and return its index."""
        self.width += 1
        return self.width - 1

    def add(self, entries: list[tuple[int, float]], below: float) -> None:
        """Add the inequality: sum of factor x variable <= below, where ``entries`` are (variable, factor)."""
        scale = max(abs(factor) for _, factor in entries)
        self._entries += [(len(self._below), variable, factor / scale) for variable, factor in entries if factor]
        self._below.append(below / scale)

    def constraint(self) -> LinearConstraint:
        row, variable, factor = zip(*self._entries, strict=True)
        matrix = coo_array((factor, (row, variable)), shape=(len(self._below), self.width))
        return LinearConstraint(matrix.tocsr(), -np.inf, self._below)


def _each_once(rows: _Rows, columns: list[_Column]) -> None:
    having: dict[str, list[int]] = {}
    for i, column in enumerate(columns):
        for op in column.candidate.ops:
            having.setdefault(op.id, []).append(i)
    for users in having.values():
        rows.add([(i, 1.0) for i in users], 1.0)


def _within_windows(rows: _Rows, columns: list[_Column], draft: Draft) -> None:
    for slot, room in enumerate(draft.room):
        users = [(i, column.candidate.load_us) for i, column in enumerate(columns) if column.slot == slot]
        if any(load for _, load in users):
            rows.add(users, room)


def _within_memory(rows: _Rows, columns: list[_Column], draft: Draft) -> None:
    """Limit the memory in each slot (the time up to the end of one window, ``ft.systems.dmr.plan.holdings``).

    A variable for each tensor and slot is 1 if the tensor is kept in that slot. A tensor that is kept in a slot is also
    kept in the slots before it, from the one in which training would free it.
    """
    kept: dict[tuple[str, int], int] = {}

    def variable(name: str, slot: int, first: int) -> int:
        for each in range(first, slot + 1):
            if (name, each) not in kept:
                kept[name, each] = rows.variable()
                if each > first:
                    rows.add([(kept[name, each], 1.0), (kept[name, each - 1], -1.0)], 0.0)
        return kept[name, slot]

    for i, column in enumerate(columns):
        for name in dict.fromkeys(column.candidate.tensors):
            first = draft.holdings.first_slot(name)
            if first <= column.slot:
                rows.add([(i, 1.0), (variable(name, column.slot, first), -1.0)], 0.0)
    for slot in range(len(draft.windows)):
        users = [(each, draft.trace.tensors[name].bytes) for (name, at), each in kept.items() if at == slot]
        if users:
            rows.add(users, draft.holdings.free(slot))
