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
from types import MappingProxyType
from typing import Protocol

from ft.base.errors import UserError
from ft.systems.dmr.plan.trace import (
    CLOSE_US,
    D_INTER,
    D_INTRA,
    NAIVE,
    PIGGYBACK,
    RECOMPUTE,
    UNCHECKED,
    AgcSegment,
    Operator,
    Plan,
)
from ft.systems.dmr.runtime.cursor import Unit, operator_id

_SURE = 3
"""After a deviation: number of consecutive operators whose names must match the plan until the position is known."""

_REACH = 256
"""After a deviation: maximum distance from the expected position in the plan at which a match is looked for."""


class OperatorAligner:
    """Aligns the operators that are executed in one unit with its planned operators.

    Args:
        names: names of the planned operators of the unit, in order.
    """

    def __init__(self, names: Sequence[str]):
        self._names = names
        self._ahead = 0
        self._strange: list[str] = []

    def find(self, index: int, operator: str) -> int | None:
        """Return the position in the plan of the operator that is executed as number ``index`` of the unit. Has to be
        called for each operator, in order.

        Returns:
            The position; None if the plan does not contain the operator, or if after a deviation it is not known yet
                where in the plan the execution continues.
        """
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
class Decision:
    """How one operator is verified.

    Args:
        set: one of ``ft.systems.dmr.plan.trace.SETS``.
        due: for the deferred sets D_inter and D_intra: number of planned operators that precede its window; None if it
            is verified in any dynamic window.
        replay: for the deferred sets: id of the AGC segment with which it is replayed; None if it is executed again by
            itself.
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


AT_ONCE = Decision(NAIVE)
WITH_RECOMPUTATION = Decision(PIGGYBACK)


NO_MISFITS: Mapping[tuple[str, str], int] = MappingProxyType({})


class Strategy(Protocol):
    """Decides for each operator how it is verified.

    Attributes:
        name: name of the strategy, for reports.
        uses_recomputation: whether operators of activation-checkpointing segments are compared with their
            recomputation.
        misfits: (phase, name of operator) -> number of operators that the plan does not contain at their place.
    """

    name: str
    uses_recomputation: bool
    misfits: Mapping[tuple[str, str], int]

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        """Return how the next operator is verified.

        Args:
            unit: phase, model chunk and microbatch that are being executed.
            index: number of the operator in ``unit``, from 0.
            operator: name of the operator.
            in_segment: True if the operator belongs to an activation-checkpointing segment that is, or will be,
                recomputed.
        """


class Naive:
    """Strategy naive DMR: verify every operator immediately."""

    name, uses_recomputation, misfits = "naive", False, NO_MISFITS

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        return AT_ONCE


class Piggyback:
    """Strategy P-DMR: compare operators with their activation recomputation where there is one, and verify all other
    operators immediately."""

    name, uses_recomputation, misfits = "piggyback", True, NO_MISFITS

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        return WITH_RECOMPUTATION if in_segment else AT_ONCE


@dataclass(frozen=True)
class Segment:
    """An AGC segment of a plan.

    Attributes:
        size: number of operators that are replayed.
        due: number of planned operators that precede its window.
    """

    size: int
    due: int


class Planned:
    """Strategy that follows a DMR plan on one stage.

    Executed operators may differ from the plan, because the profile was taken with other data or because experts got no
    tokens. Operators that the plan does not contain at their place are verified as by ``Piggyback``, and counted.

    Args:
        plan: the plan to follow.
        stage: pipeline stage of this rank.
        unstable: names of non-reproducible operators, which are neither replayed nor verified
            (``ft.systems.dmr.runtime.strategy``).

    Attributes:
        replays: AGC segments of the stage, by id.
        misfits: see ``Strategy``.
        helpers: operator id -> AGC segments that replay the operator only to produce its outputs, because it is
            verified by other means.

    Raises:
        UserError: the plan was not made from a profile of a run, or has no operators of the stage.
    """

    name, uses_recomputation = "plan", True

    def __init__(self, plan: Plan, stage: int, unstable: Collection[str] = ()):
        ops = [op for op in plan.trace.ops if op.stage == stage]
        if not ops:
            known = ", ".join(map(str, plan.trace.stages))
            raise UserError(f"the DMR plan has no operators of stage {stage}, only of stages {known}", "plan this run")
        starts = sorted(op.start_us for op in ops)
        windows = {window.id: window for window in plan.trace.windows if window.stage == stage}
        due = {
            name: None if window.dynamic else bisect.bisect_left(starts, window.start_us - CLOSE_US)
            for name, window in windows.items()
        }
        self.misfits: Counter[tuple[str, str]] = Counter()
        self._decisions: dict[tuple[str, int, int], list[tuple[str, Decision]]] = {}
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
            unit.append((op.name, Decision(how.set, when, how.agc_segment, op.check_us, size, ordinal)))
        # Units in which every operator is verified immediately need no alignment with the plan. This matters for the
        # optimizer's operators: tensor-parallel ranks do not all have the same parameters to update.
        self._abreast = {unit: OperatorAligner([name for name, _ in found]) for unit, found in self._decisions.items()}
        self._all_at_once = {
            unit for unit, found in self._decisions.items() if all(one.set == NAIVE for _, one in found)
        }
        self.replays: dict[str, Segment] = {}
        self.helpers: dict[str, list[str]] = {}
        self._plan_replays(plan, stage, due, frozenset(unstable))

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        where = (unit.phase, unit.chunk, unit.microbatch)
        if where in self._all_at_once:
            planned = self._decisions[where]
            return planned[min(index, len(planned) - 1)][1]
        follower = self._abreast.get(where)
        place = None if follower is None else follower.find(index, operator)
        if place is None:
            self.misfits[unit.phase, operator] += 1
            return WITH_RECOMPUTATION if in_segment else AT_ONCE
        decision = self._decisions[where][place][1]
        if decision.set == PIGGYBACK and not in_segment:
            return replace(AT_ONCE, ordinal=decision.ordinal)
        return decision

    def _plan_replays(self, plan: Plan, stage: int, due: Mapping[str, int | None], unstable: Collection[str]) -> None:
        by_id = {op.id: op for op in plan.trace.ops}
        recomputed: dict[tuple, list[str]] = {}
        for op in plan.trace.ops:
            if op.stage == stage and op.phase == RECOMPUTE:
                recomputed.setdefault((op.chunk, op.microbatch, op.layer), []).append(op.id)
        for segment in plan.segments.values():
            first = by_id[segment.ops[0]]
            if first.stage != stage:
                continue
            made = recomputed.get((first.chunk, first.microbatch, first.layer), []) if segment.regenerated_us else []
            made = _until_needed(made, segment, by_id)
            for name in made:
                self.helpers.setdefault(name, []).append(segment.id)
            when = due[segment.window]
            replayed = (name for name in (*segment.ops, *made) if plan.assign[name].set != UNCHECKED)
            size = sum(by_id[name].name not in unstable for name in replayed)
            self.replays[segment.id] = Segment(size, 0 if when is None else when)


def _until_needed(made: Sequence[str], segment: AgcSegment, by_id: Mapping[str, Operator]) -> Sequence[str]:
    """Return the operators of a recomputation up to the last one whose results the segment reads and does not keep."""
    inner = {tensor for name in segment.ops for tensor in by_id[name].in_ids} - set(segment.keeps)
    needed = [number for number, name in enumerate(made) if inner.intersection(by_id[name].out_ids)]
    return made[: needed[-1] + 1] if needed else []


DEFERRED = (D_INTER, D_INTRA)
SKIPPED = UNCHECKED


_LEFT_OUT = Decision(SKIPPED)


class ExcludeUnstable:
    """Strategy that follows another strategy, except that non-reproducible operators are left unverified.

    Args:
        strategy: the other strategy.
        unstable: names of the non-reproducible operators, with overloads ("index_put_", "add_.Tensor").

    Attributes:
        strategy: the other strategy.
    """

    def __init__(self, strategy: Strategy, unstable: Collection[str]):
        self.strategy, self._unstable = strategy, frozenset(unstable)
        self.uses_recomputation = strategy.uses_recomputation
        self.name = f"{strategy.name}, unstable left out: {', '.join(sorted(self._unstable))}"

    @property
    def misfits(self) -> Mapping[tuple[str, str], int]:
        return self.strategy.misfits

    def decide(self, unit: Unit, index: int, operator: str, in_segment: bool) -> Decision:
        decision = self.strategy.decide(unit, index, operator, in_segment)
        return _LEFT_OUT if operator in self._unstable else decision
