"""Phase 1, P-DMR: what activation checkpointing executes twice anyway is compared (SpareTrain, Method 1)."""

from ft.dmr.plan.assign import PIGGYBACK, Assignment
from ft.dmr.plan.draft import Draft
from ft.dmr.plan.trace import FORWARD, RECOMPUTE, Operator


def piggyback(draft: Draft) -> None:
    """Assigns P to every operator of recomputed segments, in the forward and in the recomputation.

    A segment's last operator is executed once more where recomputation leaves it out. That may as well happen in a
    window: such an operator is in P only if later phases find none. Where its execution repeats costly communication it
    is not in P at all. Operators that must be verified at once are left as well.
    """
    recomputed = {
        op.checking.segment.name for op in draft.ops if op.place.phase == RECOMPUTE and op.checking.segment is not None
    }
    for op in draft.ops:
        segment = op.checking.segment
        if segment is None or segment.name not in recomputed or op.place.phase not in (FORWARD, RECOMPUTE):
            continue
        if not draft.open(op):
            continue
        if not executes_last_again(draft.trace.early_stop, op):
            draft.assign[op.id] = Assignment(PIGGYBACK)
        elif not segment.comm_tail:
            draft.otherwise[op.id] = Assignment(PIGGYBACK)


def executes_last_again(early_stop: bool, op: Operator) -> bool:
    """P-DMR costs one more execution of this operator: a segment's last, where recomputation stops before it."""
    segment = op.checking.segment
    return early_stop and segment is not None and segment.last and op.place.phase == FORWARD
