"""Collect the mismatches that DMR finds on one rank in one iteration.

Accelerators compare by *digests*, 128-bit hashes of a tensor's bits. On a CPU a mismatch is known immediately; on an
accelerator the results of comparisons stay on the device until one synchronisation at the end of the iteration.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ft.systems.dmr.digest import differing, digest, same, writer
from ft.systems.dmr.runtime.cursor import OperatorCall

AT_ONCE, RECOMPUTATION, WINDOW, MESSAGE = "at once", "recomputation", "window", "what was sent"
REDUCTION, DISPUTED = "the other ranks' results", "the other ranks' results, of which no majority are equal"
SUM = "the sum of all ranks' parts"
BEFORE = "what its arguments were before, which it has never changed"
"""Kinds of comparisons: with an immediate second execution; with the activation recomputation; with a second execution
that was deferred to a window; of what has arrived with what was sent; of the result of an all-reduce or all-gather with
the result of the majority of the group; the same where no majority of the group has equal results; of a sum that a
communication library has computed with the sum of what was put in; of a tensor that a call has only read so far with
what it was before."""
_ROWS = 128


@dataclass(frozen=True)
class Mismatch:
    """Two executions of one operator that differ, or a tensor that arrived differently from how it was sent.

    Attributes:
        how: kind of the comparison: one of the constants above.
        elements: number of differing elements; None, like ``of`` (elements of the tensor), where only digests were
            compared.
    """

    at: OperatorCall
    how: str
    elements: int | None = None
    of: int | None = None
    note: str = ""

    def values(self) -> dict[str, Any]:
        """Return the mismatch as JSON values."""
        return {**asdict(self.at), "how": self.how, "elements": self.elements, "of": self.of, "note": self.note}

    def __str__(self) -> str:
        where = f"layer {self.at.layer}" if self.at.layer else "outside the layers"
        count = "" if self.elements is None else f", {self.elements} of {self.of} elements differ"
        unit = f"{self.at.phase} of microbatch {self.at.microbatch}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.at.operator} in the {unit}, {where}, compared with {self.how}{count}{note}"


class Rows:
    """A growing table of digests on a device, ``count`` rows of int64 [2], one for each tensor that was added."""

    def __init__(self, device: torch.device, seed: int):
        self._device, self._seed = device, seed
        self._write = writer(device)
        self._blocks: list[torch.Tensor] = []
        self._free: list[torch.Tensor] = []
        self.count = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Compute the digest of ``tensor`` and append it."""
        row = self._next()
        if tensor.device.type == self._device.type:
            self._write(tensor, self._seed, row)
        else:
            row.copy_(digest(tensor, self._seed), non_blocking=True)

    def extend(self, digests: torch.Tensor) -> None:
        """Append digests, int64 [n, 2]."""
        for row in digests:
            self._next().copy_(row)

    def _next(self) -> torch.Tensor:
        if not self._free:
            block = torch.empty((_ROWS, 2), dtype=torch.int64, device=self._device)
            self._blocks.append(block)
            self._free = list(block.unbind())[::-1]
        self.count += 1
        return self._free.pop()

    def table(self) -> torch.Tensor:
        """Return all digests as int64 [count, 2]."""
        if not self._blocks:
            return torch.empty((0, 2), dtype=torch.int64, device=self._device)
        whole = self._blocks[0] if len(self._blocks) == 1 else torch.cat(self._blocks)
        return whole[: self.count]


class Findings:
    """The mismatches of one rank in one iteration. The seed of the digests is the same on all ranks of the run.
    ``unverified``: number of operators that were compared with nothing."""

    def __init__(self, device: torch.device, seed: int):
        self.device, self.seed = device, seed
        self._known: list[Mismatch] = []
        self.restart()

    def restart(self) -> None:
        """Begin an iteration."""
        self.passed()
        self.unverified = 0

    def passed(self) -> None:
        """Forget all comparisons, because they were found equal on all ranks."""
        self._known = []
        self._pending: list[tuple[list[tuple[OperatorCall, str]], torch.Tensor, torch.Tensor]] = []
        self._hints: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pairs: list[tuple[OperatorCall, str]] = []
        self._ours = self._theirs = None

    def rows(self) -> Rows:
        """Return an empty table of digests on this device with the seed of the run."""
        return Rows(self.device, self.seed)

    def note(self, mismatch: Mismatch) -> None:
        """Record a mismatch."""
        self._known.append(mismatch)

    def pair(self, at: OperatorCall, how: str, ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
        """Compare the results of two executions: bit by bit on a CPU, by digests on an accelerator."""
        for a, b in zip(ours, theirs, strict=True):
            if a.device.type == "cpu":
                if not same(a, b):
                    self._known.append(_difference(at, how, a, b))
                continue
            if self._ours is None:
                self._ours, self._theirs = self.rows(), self.rows()
            self._ours.add(a)
            self._theirs.add(b)
            self._pairs.append((at, how))

    def tables(self, places: list[tuple[OperatorCall, str]], expected: torch.Tensor, found: torch.Tensor) -> None:
        """Compare two tables of digests, int64 [len(places), 2]. ``places`` names the operator and the kind of
        comparison of each row."""
        self._pending.append((places, expected, found))

    def hint(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Compare two tables of digests for ``flag`` only. If they differ, the caller has to note the mismatches."""
        self._hints.append((expected, found))

    @property
    def any_known(self) -> bool:
        """Return whether a mismatch is known without synchronising with the device."""
        return bool(self._known)

    def flag(self) -> torch.Tensor:
        """Return 1 if anything differed, else 0, as int32 [1] on the device, without synchronising."""
        self._gather_pairs()
        tables = [(a, b) for _, a, b in self._pending] + self._hints
        if self._known or not tables:
            return torch.full((1,), int(bool(self._known)), dtype=torch.int32, device=self.device)
        expected, found = (torch.cat(each) for each in zip(*tables, strict=True))
        return (expected != found).any().to(torch.int32).reshape(1)

    def settle(self) -> list[Mismatch]:
        """Return all mismatches. Synchronises with the device."""
        self._gather_pairs()
        for places, expected, found in self._pending:
            rows = (expected != found).any(dim=1).nonzero().flatten().tolist()
            self._known += [Mismatch(*places[row]) for row in rows]
        self._pending = []
        return self._known

    def _gather_pairs(self) -> None:
        if self._ours is not None:
            self.tables(self._pairs, self._ours.table(), self._theirs.table())
            self._ours = self._theirs = None
            self._pairs = []


def _difference(at: OperatorCall, how: str, a: torch.Tensor, b: torch.Tensor) -> Mismatch:
    if a.dtype != b.dtype or a.shape != b.shape:
        return Mismatch(at, how, note=f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
    return Mismatch(at, how, int(differing(a, b)), a.numel())
