"""Phase 1 of the DMR planner, P-DMR: verify operators by activation recomputation (SpareTrain, Method 1).

DMR (dual modular redundancy) verifies an operator by executing it twice and comparing the results. Activation
checkpointing executes the operators of a checkpointed segment twice anyway, in the forward pass and in the
recomputation. These two executions are compared; such operators are in set P of the plan.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ft.systems.dmr.plan.assign import PIGGYBACK, Assignment
from ft.systems.dmr.plan.draft import Draft
from ft.systems.dmr.plan.trace import FORWARD, RECOMPUTE, Operator


def piggyback(draft: Draft) -> None:
    """Assign set P to every operator of recomputed segments, in the forward pass and in the recomputation.

    Where recomputation leaves out the last operator of a segment, P-DMR executes that operator once more. This could
    also be done in a window (a time in which the stage communicates or is idle), so such an operator is assigned to P
    only if the later phases find no window for it. If executing it again repeats costly communication, it is not
    assigned to P at all.
    """
    twice = executed_twice(draft.ops)
    for op in draft.ops:
        if executes_last_again(draft.trace.early_stop, op):
            if draft.open(op) and op.checking.segment.name in twice.segments and not op.checking.segment.comm_tail:
                draft.otherwise[op.id] = Assignment(PIGGYBACK)
        elif op.id in twice.ops:
            draft.assign[op.id] = Assignment(PIGGYBACK)


class RepeatedOperators(NamedTuple):
    """Operators that activation checkpointing executes twice with the same result.

    Attributes:
        ops: ids of these operators, in the forward pass and in the recomputation.
        segments: names of the checkpointed segments that are recomputed.
    """

    ops: frozenset[str]
    segments: frozenset[str]


def executed_twice(ops: Sequence[Operator]) -> RepeatedOperators:
    """Return the operators of checkpointed segments that both the forward pass and the recomputation execute.

    The n-th operator of a name in a segment's forward pass corresponds to the n-th operator of that name in its
    recomputation. Recomputation may stop early, and a forward pass without gradients may consist of other operators:
    operators without a counterpart are left out. Operators that change a tensor which other segments or phases change
    as well, such as a counter, are left out too, because they read another value there the second time. A tensor that
    only one segment's forward pass or recomputation changes is taken to be newly created in it.
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
    return RepeatedOperators(matched, frozenset(segment for (segment, _), (_, again) in found.items() if again))


def executes_last_again(early_stop: bool, op: Operator) -> bool:
    """Return whether P-DMR has to execute this operator once more, because it is the last operator of a checkpointed
    segment and recomputation stops before it (``early_stop``)."""
    segment = op.checking.segment
    return early_stop and segment is not None and segment.last and op.place.phase == FORWARD
