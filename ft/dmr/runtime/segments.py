"""P-DMR: a segment's forward and its recomputation, operator by operator (SpareTrain, Method 1).

Of every operator of the forward a digest is kept, and the recomputation's digest is held against it. Comparing the
segment's output alone is not complete: what a backward reads besides, such as a layer norm's statistics, may be wrong
without showing there (science/dmr.md).
"""

from collections.abc import Sequence

import torch

from ft.dmr.runtime.course import At
from ft.dmr.runtime.findings import RECOMPUTATION, Findings, Mismatch


class Segment:
    """One segment in one microbatch, from its forward to its recomputation.

    Attributes:
        is_comparable: operators from here on come out the same when they are executed again.
    """

    def __init__(self, findings: Findings):
        self._findings = findings
        self._names: list[str] = []
        self._places: list[tuple[At, str]] = []
        self._expected, self._found = findings.rows(), None
        self._next = 0
        self._out_of_step = False
        self.is_comparable = True

    def primary(self, at: At, outs: Sequence[torch.Tensor]) -> None:
        """An operator of the forward has been executed."""
        self._names.append(at.operator)
        for tensor in outs:
            self._expected.add(tensor)
            self._places.append((at, RECOMPUTATION))

    def begin_again(self) -> None:
        """The recomputation begins."""
        self._found, self._next = self._findings.rows(), 0
        self.is_comparable = True

    def unchecked(self) -> None:
        """An operator has been executed that comes out otherwise each time, and what reads it does so too."""
        self.is_comparable = False

    def again(self, at: At, outs: Sequence[torch.Tensor]) -> None:
        """An operator of the recomputation has been executed."""
        expected = self._names[self._next] if self._next < len(self._names) else None
        self._next += 1
        if expected != at.operator and not self._out_of_step:
            self._out_of_step = True
            note = f"the forward had {expected or 'no further operator'} there: other operators than before"
            self._findings.note(Mismatch(at, RECOMPUTATION, note=note))
        for tensor in outs:
            self._found.add(tensor)

    def end_again(self) -> None:
        """The recomputation has ended. Operators that early stopping left out are unverified."""
        missing = len(self._names) - self._next
        self._findings.unverified += max(missing, 0)
        if self._out_of_step:
            return
        count = min(self._expected.count, self._found.count)
        expected, found = self._expected.table()[:count], self._found.table()[:count]
        if found.device.type != "cpu" or not torch.equal(expected, found):
            self._findings.tables(self._places[:count], expected, found)
        self._expected = self._found = None
