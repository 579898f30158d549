"""Phase 1, P-DMR: what activation checkpointing executes twice anyway is compared (SpareTrain, Method 1)."""

from collections.abc import Sequence
from typing import NamedTuple

from ft.systems.dmr.plan.assign import PIGGYBACK, Assignment
from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import FORWARD, RECOMPUTE, Operator


def piggyback(draft: Draft) -> None:
    """Assigns P to every operator of recomputed segments, in the forward and in the recomputation.

    A segment's last operator is executed once more where recomputation leaves it out. That may as well happen in a
    window: such an operator is in P only if later phases find none. Where its execution repeats costly communication it
    is not in P at all.
    """
    twice = executed_twice(draft.ops)
    for op in draft.ops:
        if executes_last_again(draft.trace.early_stop, op):
            if draft.open(op) and op.checking.segment.name in twice.segments and not op.checking.segment.comm_tail:
                draft.otherwise[op.id] = Assignment(PIGGYBACK)
        elif op.id in twice.ops:
            draft.assign[op.id] = Assignment(PIGGYBACK)


class Twice(NamedTuple):
    """Operators that activation checkpointing executes twice alike, and its segments that are recomputed at all."""

    ops: frozenset[str]
    segments: frozenset[str]


def executed_twice(ops: Sequence[Operator]) -> Twice:
    """Operators of a segment's forward that its recomputation executes too, and these.

    The n-th one of a name is the n-th one of that name. Recomputation may stop early, and a forward without gradients
    may consist of other operators: what is there once is not covered by it. Nor is what changes a tensor that others
    change as well, a counter say: the second time it finds another value there. A tensor that only one segment's
    forward or recomputation changes is new in it.
    """
    found: dict[tuple[str, str], tuple[list[Operator], list[Operator]]] = {}
    changed_in: dict[str, set[tuple[str, str]]] = {}
    for op in ops:
        segment = op.checking.segment.name if op.checking.segment is not None else ""
        for name in op.checking.mutates:
            changed_in.setdefault(name, set()).add((segment, op.place.phase))
        if segment and op.place.phase in (FORWARD, RECOMPUTE):
            found.setdefault((segment, op.name), ([], []))[op.place.phase == RECOMPUTE].append(op)

    def alike(op: Operator) -> bool:
        return op.checking.deterministic and all(len(changed_in[name]) == 1 for name in op.checking.mutates)

    pairs = (pair for first, again in found.values() for pair in zip(first, again, strict=False))
    matched = frozenset(op.id for pair in pairs if all(map(alike, pair)) for op in pair)
    return Twice(matched, frozenset(segment for (segment, _), (_, again) in found.items() if again))


def executes_last_again(early_stop: bool, op: Operator) -> bool:
    """P-DMR costs one more execution of this operator: a segment's last, where recomputation stops before it."""
    segment = op.checking.segment
    return early_stop and segment is not None and segment.last and op.place.phase == FORWARD
