"""Phase 1, P-DMR: what activation checkpointing executes twice anyway is compared (SpareTrain, Method 1)."""

from collections.abc import Iterable
from typing import NamedTuple

from ft.dmr.plan.assign import PIGGYBACK, Assignment
from ft.dmr.plan.draft import Draft
from ft.dmr.plan.trace import FORWARD, RECOMPUTE, Operator


def piggyback(draft: Draft) -> None:
    """Assigns P to every operator of recomputed segments, in the forward and in the recomputation.

    A segment's last operator is executed once more where recomputation leaves it out. That may as well happen in a
    window: such an operator is in P only if later phases find none. Where its execution repeats costly communication it
    is not in P at all. Operators that must be verified at once are left as well.
    """
    twice = executed_twice(draft.ops)
    for op in draft.ops:
        again = executes_last_again(draft.trace.early_stop, op) and op.checking.segment.name in twice.segments
        if not (again or op.id in twice.ops):
            continue
        if not draft.open(op):
            continue
        if not again:
            draft.assign[op.id] = Assignment(PIGGYBACK)
        elif not op.checking.segment.comm_tail:
            draft.otherwise[op.id] = Assignment(PIGGYBACK)


class Twice(NamedTuple):
    """Operators that activation checkpointing executes twice, and its segments that are recomputed at all."""

    ops: frozenset[str]
    segments: frozenset[str]


def executed_twice(ops: Iterable[Operator]) -> Twice:
    """Operators of a segment's forward that its recomputation executes too, and these.

    The n-th one of a name is the n-th one of that name. Recomputation may stop early, and a forward without gradients
    may consist of other operators: what is there once is not covered by it.
    """
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for op in ops:
        if op.checking.segment is not None and op.place.phase in (FORWARD, RECOMPUTE):
            pair = found.setdefault((op.checking.segment.name, op.name), ([], []))
            pair[op.place.phase == RECOMPUTE].append(op.id)
    matched = (each for first, again in found.values() for both in zip(first, again, strict=False) for each in both)
    return Twice(frozenset(matched), frozenset(segment for (segment, _), (_, again) in found.items() if again))


def executes_last_again(early_stop: bool, op: Operator) -> bool:
    """P-DMR costs one more execution of this operator: a segment's last, where recomputation stops before it."""
    segment = op.checking.segment
    return early_stop and segment is not None and segment.last and op.place.phase == FORWARD
