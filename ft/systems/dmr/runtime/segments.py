"""P-DMR: compare the forward pass of an activation-checkpointing segment with its recomputation (SpareTrain, Method 1).

For operators of an activation-checkpointing segment, the recomputation is the second execution.

A digest of the results of every forward operator is kept and compared with the digest in the recomputation. Comparing
only the output of the segment would miss errors: other tensors that the backward pass reads, such as the statistics of
a layer norm, may be wrong without an effect on that output.

A recomputation may contain operators that its forward pass did not, because core executes them only where gradients are
recorded, such as the auxiliary loss of a router. These extra operators have no counterpart and are verified
immediately. Which operators are extra is learnt from earlier recomputations. Where a recomputation executes another
operator than was expected, this operator and all later operators are verified immediately. At the end the operators of
the forward pass are looked for among those of the recomputation, in order, by name and digest. A mismatch is noted for
each operator that is not found.

An operator that writes in place to memory from before the segment, such as a counter, does not come to the same in the
recomputation. It is verified immediately, in both passes.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ft.systems.dmr.plan.trace import PIGGYBACK
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import RECOMPUTATION, Findings, Mismatch, Rows
from ft.systems.dmr.runtime.strategy import AT_ONCE, WITH_RECOMPUTATION, CheckMethod

_CONFIRMED = 3
_MOST_SCRIPTS = 1000


@dataclass(frozen=True, slots=True)
class SegmentStep:
    """One operator of a recomputation; extra if the forward pass has no corresponding operator."""

    name: str
    is_extra: bool


class RecomputationSteps:
    """Learnt sequences of recomputation steps, by the operators of the forward pass. A learnt sequence is used once it
    has been seen ``_CONFIRMED`` times, since two results may be equal by chance."""

    def __init__(self):
        self._seen: dict[tuple[str, ...], tuple[tuple[SegmentStep, ...], int]] = {}

    def of(self, forward: Sequence[str]) -> tuple[SegmentStep, ...]:
        """Return the steps that are expected in the recomputation of a forward pass with these operators."""
        script, times = self._seen.get(tuple(forward), ((), 0))
        return script if times >= _CONFIRMED else tuple(SegmentStep(name, is_extra=False) for name in forward)

    def saw(self, forward: Sequence[str], script: tuple[SegmentStep, ...]) -> None:
        """Record the steps of a recomputation that had no mismatch."""
        if len(self._seen) >= _MOST_SCRIPTS:
            self._seen.clear()
        known, times = self._seen.get(tuple(forward), ((), 0))
        self._seen[tuple(forward)] = (script, times + 1 if known == script else 1)


class Segment:
    """One activation-checkpointing segment in one microbatch, from its forward pass to its recomputation.
    ``is_comparable``: False from the first operator on whose result differs each time it is executed."""

    def __init__(self, findings: Findings, scripts: RecomputationSteps):
        self._findings, self._scripts = findings, scripts
        self._names: list[str] = []
        self._places: list[tuple[OperatorCall, str]] = []
        self._widths: list[int] = []
        self._expected, self._found = findings.rows(), None
        self._forward: list[tuple[str, bool]] = []
        self._position = 0
        self._created: dict[int, StorageWeakRef] = {}
        self._calls: list[str] = []
        self._called = 0
        self.is_comparable = True

    def calls(self, function: str) -> None:
        """Note that the forward pass calls a function that is verified as a whole."""
        self._calls.append(function)

    def called(self) -> str | None:
        """Return the function that the forward pass has called where the recomputation calls one now; None: none."""
        self._called += 1
        return self._calls[self._called - 1] if self._called <= len(self._calls) else None

    def returned(self, results: Iterable[torch.Tensor], arguments: Collection[torch.Tensor]) -> None:
        """Note which memory an operator of the segment has allocated: that of its results, if no argument has it."""
        for tensor in results:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self._created and all(one.untyped_storage()._cdata != address for one in arguments):
                # the weak reference prevents the allocator from giving the same address to another storage
                self._created[address] = StorageWeakRef(storage)

    def has_created(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether the memory of all ``tensors`` was allocated by operators of this pass of the segment."""
        return all(tensor.untyped_storage()._cdata in self._created for tensor in tensors)

    def settle(self, decision: CheckMethod, name: str, *, again: bool) -> CheckMethod:
        """Return the decision for the next operator, changed so that forward pass and recomputation (``again``) agree:
        either both executions of an operator are recorded for the comparison or neither is. Where a run deviates from
        its plan, the plan may contain contradicting decisions about the two executions."""
        if not again:
            self._forward.append((name, decision.set == PIGGYBACK))
            return decision
        if self._position == len(self._forward) or self._forward[self._position][0] != name:
            return decision  # not the next operator of the forward pass: ``is_extra`` decides about it
        is_compared = self._forward[self._position][1]
        self._position += 1
        if is_compared:
            return WITH_RECOMPUTATION
        return AT_ONCE if decision.set == PIGGYBACK else decision

    def primary(self, at: OperatorCall, outs: Sequence[torch.Tensor], sent: Rows | None = None) -> None:
        """Record the results of an operator of the forward pass. ``sent``: digests of what it has sent to other ranks,
        if it is a call that is verified as a whole."""
        parts = sent.count if sent is not None else 0
        self._names.append(at.operator)
        self._widths.append(parts + len(outs))
        if parts:
            self._expected.extend(sent.table())
            self._places += [(replace(at, part=number), RECOMPUTATION) for number in range(1, parts + 1)]
        for tensor in outs:
            self._expected.add(tensor)
            self._places.append((at, RECOMPUTATION))

    def begin_again(self) -> None:
        """Begin the recomputation."""
        self._found = self._findings.rows()
        self._script = self._scripts.of(self._names)
        self._steps: list[SegmentStep] = []
        self._rows: list[range] = []
        self._lost_at: int | None = None
        self._position = 0
        self._created = {}
        self._called = 0
        self.is_comparable = True

    def unchecked(self) -> None:
        """Record that a non-reproducible operator has been executed: it and all operators that read its results differ
        each time."""
        self.is_comparable = False

    def is_extra(self, name: str) -> bool:
        """Return whether the recomputation's next operator, which is about to run, has to be verified immediately,
        because it is extra or because the recomputation has deviated from the expected steps."""
        at = len(self._steps)
        if self._lost_at is None and (at >= len(self._script) or self._script[at].name != name):
            self._lost_at = at
        return self._lost_at is not None or self._script[at].is_extra

    def again(self, at: OperatorCall, outs: Sequence[torch.Tensor], sent: Rows | None = None) -> None:
        """Record the results of an operator of the recomputation; the arguments are those of :meth:`primary`."""
        is_extra = self._lost_at is None and self._script[len(self._steps)].is_extra
        self._steps.append(SegmentStep(at.operator, is_extra))
        parts = sent.count if sent is not None else 0
        self._rows.append(range(self._found.count, self._found.count + parts + len(outs)))
        if parts:
            self._found.extend(sent.table())
        for tensor in outs:
            self._found.add(tensor)

    def end_again(self) -> None:
        """End the recomputation and compare it with the forward pass. Operators that the recomputation left out because
        it stopped early count as unverified."""
        if self._lost_at is not None:
            self._look_for_all()
            return
        left_out = sum(not step.is_extra for step in self._script[len(self._steps) :])
        self._findings.unverified += left_out
        found = self._found.table()
        if any(step.is_extra for step in self._steps):
            rows = [
                row for step, each in zip(self._steps, self._rows, strict=True) if not step.is_extra for row in each
            ]
            found = found[torch.tensor(rows, dtype=torch.int64, device=found.device)]
        count = min(self._expected.count, found.shape[0])
        expected, found = self._expected.table()[:count], found[:count]
        if found.device.type != "cpu" or not torch.equal(expected, found):
            self._findings.tables(self._places[:count], expected, found)
        self._expected = self._found = None

    def _look_for_all(self) -> None:
        """Look for every operator of the forward pass in the recomputation, in order, and note a mismatch for each that
        is missing."""
        expected, found = self._expected.table().tolist(), self._found.table().tolist()
        partners: set[int] = set()
        begins, row, is_whole = 0, 0, True
        for name, width in zip(self._names, self._widths, strict=True):
            wanted = expected[row : row + width]
            at = next(
                (
                    number
                    for number in range(begins, len(self._steps))
                    if self._steps[number].name == name and [found[each] for each in self._rows[number]] == wanted
                ),
                None,
            )
            if at is None:
                is_whole = False
                if width:
                    note = "nothing in the recomputation comes to the same"
                    self._findings.note(Mismatch(self._places[row][0], RECOMPUTATION, note=note))
            else:
                partners.add(at)
                begins = at + 1
            row += width
        self._findings.unverified += sum(number not in partners for number in range(self._lost_at))
        if is_whole:
            steps = (SegmentStep(step.name, number not in partners) for number, step in enumerate(self._steps))
            self._scripts.saw(self._names, tuple(steps))
        self._expected = self._found = None
