"""P-DMR: a segment's forward and its recomputation, operator by operator (SpareTrain, Method 1).

Of every operator of the forward a digest is kept, and the recomputation's digest is held against it. Comparing the
segment's output alone is not complete: what a backward reads besides, such as a layer norm's statistics, may be wrong
without showing there (science/dmr.md).

A recomputation may have operators that its forward had not: what core does only where gradients are recorded, such as a
router's auxiliary loss. Those have no partner and are verified at once. Which ones they are is learnt: where a
recomputation has another operator than was expected, it and all after it are verified at once, and at the end the
forward's operators are looked for among them, in order, by name and digest. Each has to be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ft.systems.dmr.plan.assign import PIGGYBACK
from ft.systems.dmr.runtime.cursor import At
from ft.systems.dmr.runtime.findings import RECOMPUTATION, Findings, Mismatch
from ft.systems.dmr.runtime.strategy import AT_ONCE, WITH_RECOMPUTATION, Decision

_CONFIRMED = 3
_MOST_SCRIPTS = 1000


@dataclass(frozen=True, slots=True)
class Step:
    """An operator of a recomputation. ``is_extra``: the forward had none there."""

    name: str
    is_extra: bool


class Scripts:
    """How recomputations went: operators of the forward -> steps of the recomputation.

    A script is followed once it has been seen ``_CONFIRMED`` times: two results may be equal once by chance.
    """

    def __init__(self):
        self._seen: dict[tuple[str, ...], tuple[tuple[Step, ...], int]] = {}

    def of(self, forward: Sequence[str]) -> tuple[Step, ...]:
        """What is expected after a forward with these operators."""
        script, times = self._seen.get(tuple(forward), ((), 0))
        return script if times >= _CONFIRMED else tuple(Step(name, is_extra=False) for name in forward)

    def saw(self, forward: Sequence[str], script: tuple[Step, ...]) -> None:
        """A recomputation without a mismatch went like this."""
        if len(self._seen) >= _MOST_SCRIPTS:
            self._seen.clear()
        known, times = self._seen.get(tuple(forward), ((), 0))
        self._seen[tuple(forward)] = (script, times + 1 if known == script else 1)


class Segment:
    """One segment in one microbatch, from its forward to its recomputation.

    Attributes:
        is_comparable: operators from here on come out the same when they are executed again.
    """

    def __init__(self, findings: Findings, scripts: Scripts):
        self._findings, self._scripts = findings, scripts
        self._names: list[str] = []
        self._places: list[tuple[At, str]] = []
        self._widths: list[int] = []
        self._expected, self._found = findings.rows(), None
        self._forward: list[tuple[str, bool]] = []
        self._position = 0
        self.is_comparable = True

    def settle(self, decision: Decision, name: str, *, again: bool) -> Decision:
        """What becomes of ``decision`` about the next operator. It is compared with its recomputation on both sides or
        on none: where a run is not as it was planned, a plan may say one thing here and another there."""
        if not again:
            self._forward.append((name, decision.set == PIGGYBACK))
            return decision
        if self._position == len(self._forward) or self._forward[self._position][0] != name:
            return decision  # the forward had none: what it is becomes clear when it is expected
        is_compared = self._forward[self._position][1]
        self._position += 1
        if is_compared:
            return WITH_RECOMPUTATION
        return AT_ONCE if decision.set == PIGGYBACK else decision

    def primary(self, at: At, outs: Sequence[torch.Tensor]) -> None:
        """An operator of the forward has been executed."""
        self._names.append(at.operator)
        self._widths.append(len(outs))
        for tensor in outs:
            self._expected.add(tensor)
            self._places.append((at, RECOMPUTATION))

    def begin_again(self) -> None:
        """The recomputation begins."""
        self._found = self._findings.rows()
        self._script = self._scripts.of(self._names)
        self._steps: list[Step] = []
        self._rows: list[range] = []
        self._lost_at: int | None = None
        self._position = 0
        self.is_comparable = True

    def unchecked(self) -> None:
        """An operator has been executed that comes out otherwise each time, and what reads it does so too."""
        self.is_comparable = False

    def is_extra(self, name: str) -> bool:
        """Whether the recomputation's next operator, about to be executed, has to be verified by itself."""
        at = len(self._steps)
        if self._lost_at is None and (at >= len(self._script) or self._script[at].name != name):
            self._lost_at = at
        return self._lost_at is not None or self._script[at].is_extra

    def again(self, at: At, outs: Sequence[torch.Tensor]) -> None:
        """An operator of the recomputation has been executed."""
        is_extra = self._lost_at is None and self._script[len(self._steps)].is_extra
        self._steps.append(Step(at.operator, is_extra))
        self._rows.append(range(self._found.count, self._found.count + len(outs)))
        for tensor in outs:
            self._found.add(tensor)

    def end_again(self) -> None:
        """The recomputation has ended. Operators that early stopping left out are unverified."""
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
        """Every operator of the forward has to be in the recomputation, in order."""
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
            steps = (Step(step.name, number not in partners) for number, step in enumerate(self._steps))
            self._scripts.saw(self._names, tuple(steps))
        self._expected = self._found = None
