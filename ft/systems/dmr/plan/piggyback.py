"""Phase 1, P-DMR: verify what activation checkpointing executes twice anyway by comparing it (SpareTrain, Method 1)."""

from collections.abc import Sequence
from typing import NamedTuple

from ft.systems.dmr.plan.assign import PIGGYBACK, Assignment
from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import FORWARD, RECOMPUTE, Operator


def piggyback(draft: Draft) -> None:
    """Assign P to every operator of recomputed segments, in the forward and in the recomputation.

    Where recomputation leaves out the last operator of a segment, that operator is executed once more. This can also be
    done in a window, so such an operator is in P only if later phases find no window for it. If executing it again
    repeats costly communication, it is not in P at all.
    """
    twice = executed_twice(draft.ops)
    for op in draft.ops:
        if executes_last_again(draft.trace.early_stop, op):
            if draft.open(op) and op.checking.segment.name in twice.segments and not op.checking.segment.comm_tail:
                draft.otherwise[op.id] = Assignment(PIGGYBACK)
        elif op.id in twice.ops:
            draft.assign[op.id] = Assignment(PIGGYBACK)


class Twice(NamedTuple):
    """Operators that activation checkpointing executes twice with the same result, and the segments that are recomputed
    at all."""

    ops: frozenset[str]
    segments: frozenset[str]


def executed_twice(ops: Sequence[Operator]) -> Twice:
    """Return the operators of a segment's forward that its recomputation executes too, and their counterparts in the
    recomputation.

    The n-th operator of a name in the forward corresponds to the n-th of that name in the recomputation. Recomputation
    may stop early, and a forward without gradients may consist of other operators: operators without a counterpart are
    not covered. Nor are operators that change a tensor which other segments or phases change as well, such as a
    counter, because they find another value there the second time. A tensor that only one segment's forward or
    recomputation changes is taken to be newly created in it.
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
    """Return whether P-DMR executes this operator once more: it is the last of a segment, and recomputation stops
    before it."""
    segment = op.checking.segment
    return early_stop and segment is not None and segment.last and op.place.phase == FORWARD
