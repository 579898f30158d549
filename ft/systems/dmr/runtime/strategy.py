"""Strategies of DMR, which decide how each operator is verified: all in the same way, or as a DMR plan says.

An operator is executed a second time immediately (naive DMR), with the recomputation of activation checkpointing
(P-DMR), or later in a window, a time in which the rank communicates or is idle (D-DMR). How an executed operator is to
be verified is looked up in the plan. The operators of a *unit* (one phase of one microbatch on one model chunk) may
differ from the profiled ones: experts without tokens are left out, and a mask that already exists is not created again.
Operators that compute a different result each time cannot be compared, and are left unverified.

An *AGC segment* is a sequence of operators that is executed again (replayed) as a whole. A window is *dynamic* if its
duration differs in every iteration.
"""

import bisect
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ft.base.errors import UserError
from ft.systems.dmr.plan.trace import (
    CLOSE_US,
    D_INTER,
    D_INTRA,
    NAIVE,
    PIGGYBACK,
    UNCHECKED,
    Plan,
)
from ft.systems.dmr.runtime.cursor import ExecutedUnit, operator_id

_SURE = 3
"""After a deviation: number of consecutive operators whose names must match the plan until the position is known."""

_REACH = 256
"""After a deviation: maximum distance from the expected position in the plan at which a match is looked for."""


class OperatorAligner:
    """Aligns the operators that are executed in one unit with the names of its planned operators."""

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._ahead = 0
        self._strange: list[str] = []

    def find(self, index: int, operator: str) -> int | None:
        """Return the position in the plan of the operator that is executed as number ``index`` of the unit; None if the
        plan does not contain it, or if after a deviation it is not known yet where in the plan the execution continues.
        Has to be called for each operator, in order."""
        if index == 0:
            self._ahead, self._strange = 0, []
        expected = index + self._ahead
        if not self._strange and expected < len(self._names) and self._names[expected] == operator:
            return expected
        self._strange = [*self._strange, operator][-_SURE:]
        if len(self._strange) < _SURE:
            return None
        place = self._nearest(expected)
        if place is not None:
            self._ahead, self._strange = place - index, []
        return place

    def _nearest(self, expected: int) -> int | None:
        """Return the position in the plan of the last _SURE executed operators, as near as possible to ``expected``;
        None if they are not found."""
        for far in range(_REACH):
            for place in (expected + far, expected - far):
                first = place - _SURE + 1
                if first >= 0 and list(self._names[first : place + 1]) == self._strange:
                    return place
        return None


@dataclass(frozen=True, slots=True)
class CheckMethod:
    """How one operator is verified.

    Attributes:
        set: one of ``ft.systems.dmr.plan.trace.SETS``.
        due: (deferred) number of planned operators that precede its window; None if it is verified in any dynamic
            window.
        replay: (deferred) id of the AGC segment with which it is replayed; None if it is executed again by itself.
        check_us: expected duration of verifying it, in microseconds.
        bytes: memory that is kept until it is verified and would be free otherwise, in bytes.
        ordinal: its position among the planned operators, counted from 1; 0 if no plan contains it.
    """

    set: str
    due: int | None = 0
    replay: str | None = None
    check_us: float = 0.0
    bytes: float = 0.0
    ordinal: int = 0


DEFERRED = (D_INTER, D_INTRA)
AT_ONCE, WITH_RECOMPUTATION, _LEFT_OUT = CheckMethod(NAIVE), CheckMethod(PIGGYBACK), CheckMethod(UNCHECKED)


class PlannedSegment(NamedTuple):
    """An AGC segment of a plan: the number of operators that are replayed, and the number of planned operators that
    precede its window."""

    size: int
    due: int


class Strategy:
    """Decides for each operator how it is verified: immediately (naive), or with its activation recomputation where
    there is one and else immediately (piggyback).

    Args:
        name: "naive" or "piggyback".
        unstable: names, with overloads ("index_put_", "add_.Tensor"), of operators that are not reproducible: left
            unverified.

    Attributes:
        misfits: (phase, name of operator) -> number of operators that the plan does not contain at their place.
        replays: AGC segments of the stage, by id.
        helpers: operator id -> AGC segments that replay the operator only to produce its outputs.
    """

    def __init__(self, name: str, unstable: Collection[str] = ()):
        self._unstable = frozenset(unstable)
        self.name = f"{name}, unstable left out: {', '.join(sorted(unstable))}" if unstable else name
        self.uses_recomputation = name != NAIVE
        self.misfits: Counter[tuple[str, str]] = Counter()
        self.replays: dict[str, PlannedSegment] = {}
        self.helpers: dict[str, list[str]] = {}

    def decide(self, unit: ExecutedUnit, index: int, operator: str, in_segment: bool) -> CheckMethod:
        """Return how operator number ``index`` (from 0) of a unit is verified. Has to be called for each operator, in
        order. ``in_segment``: whether it belongs to an activation-checkpointing segment that is, or will be,
        recomputed."""
        if operator in self._unstable:
            return _LEFT_OUT
        return WITH_RECOMPUTATION if in_segment and self.uses_recomputation else AT_ONCE


class Planned(Strategy):
    """Strategy that follows a DMR plan on one stage.

    Executed operators may differ from the plan, because the profile was taken with other data or because experts got no
    tokens. Operators that the plan does not contain at their place are verified as with piggyback, and counted.

    Raises:
        UserError: the plan was not made from a profile of a run, or has no operators of the stage.
    """

    def __init__(self, plan: Plan, stage: int, unstable: Collection[str] = ()):
        super().__init__("plan", unstable)
        ops = [op for op in plan.trace.ops if op.stage == stage]
        if not ops:
            known = ", ".join(map(str, plan.trace.stages))
            raise UserError(f"the DMR plan has no operators of stage {stage}, only of stages {known}", "plan this run")
        starts = sorted(op.start_us for op in ops)
        due = {
            window.id: None if window.dynamic else bisect.bisect_left(starts, window.start_us - CLOSE_US)
            for window in plan.trace.windows
            if window.stage == stage
        }
        self._decisions: dict[tuple[str, int, int], list[tuple[str, CheckMethod]]] = {}
        for ordinal, op in enumerate(ops, 1):
            how, where = plan.assign[op.id], (op.phase, op.chunk, op.microbatch)
            unit = self._decisions.setdefault(where, [])
            if op.id != operator_id(stage, *where, len(unit)):
                raise UserError(
                    f"the DMR plan's operator {op.id!r} does not come from the profile of a run",
                    "profile the run itself: ft dmr profile, then ft dmr plan",
                )
            when = 0 if how.window is None else due[how.window]
            kept = (plan.trace.tensors[tensor] for tensor in dict.fromkeys(op.tensors))
            size = sum(tensor.bytes for tensor in kept if tensor.free_us is not None)
            unit.append((op.name, CheckMethod(how.set, when, how.agc_segment, op.check_us, size, ordinal)))
        # Units in which every operator is verified immediately need no alignment with the plan. This matters for the
        # optimizer's operators: tensor-parallel ranks do not all have the same parameters to update.
        self._abreast = {unit: OperatorAligner([name for name, _ in found]) for unit, found in self._decisions.items()}
        self._all_at_once = {
            unit for unit, found in self._decisions.items() if all(one.set == NAIVE for _, one in found)
        }
        self._plan_replays(plan, stage, due)

    def decide(self, unit: ExecutedUnit, index: int, operator: str, in_segment: bool) -> CheckMethod:
        planned = self._planned(unit, index, operator, in_segment)  # in any case, because it follows the order
        return _LEFT_OUT if operator in self._unstable else planned

    def _planned(self, unit: ExecutedUnit, index: int, operator: str, in_segment: bool) -> CheckMethod:
        where = (unit.phase, unit.chunk, unit.microbatch)
        if where in self._all_at_once:
            planned = self._decisions[where]
            return planned[min(index, len(planned) - 1)][1]
        follower = self._abreast.get(where)
        place = None if follower is None else follower.find(index, operator)
        if place is None:
            self.misfits[unit.phase, operator] += 1
            return super().decide(unit, index, operator, in_segment)
        decision = self._decisions[where][place][1]
        if decision.set == PIGGYBACK and not in_segment:
            return replace(AT_ONCE, ordinal=decision.ordinal)
        return decision

    def _plan_replays(self, plan: Plan, stage: int, due: Mapping[str, int | None]) -> None:
        for name, segment in plan.segments.items():
            if segment.window not in due:  # of another stage
                continue
            for op in segment.again:
                self.helpers.setdefault(op, []).append(name)
            checked = (op for op in (*segment.ops, *segment.again) if plan.assign[op].set != UNCHECKED)
            size = sum(plan.trace.op_by_id[op].name not in self._unstable for op in checked)
            self.replays[name] = PlannedSegment(size, due[segment.window] or 0)
