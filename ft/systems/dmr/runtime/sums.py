"""Verify sums that a communication library computes, by the sums of blocks of elements.

A library adds the parts of several ranks in an order that nobody knows, so its result cannot be computed again bit for
bit. But the sum of a block of elements of the result must equal the sum of that block over all ranks' parts, up to
rounding: in whatever order n numbers are added, rounding changes their sum by at most (n - 1) u / (1 - (n - 1) u) times
the sum of their magnitudes (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2; u: unit roundoff). An
error is found for certain if it changes the sum of a block by more than twice 2 (n + 1) u times the sum of magnitudes
of the block; a smaller one may not be seen. With numbers of like magnitude on 8 ranks, that is a change of one element
by two thousandths of it in fp32, and by 18 times its magnitude in bf16, such as a flip of an upper bit of an exponent.
"""

import torch
import torch.distributed as dist

from ft.systems.dmr.digest import native
from ft.systems.dmr.runtime.cursor import OperatorCall
from ft.systems.dmr.runtime.findings import SUM, Findings, Mismatch

_BLOCKS = {4: 1024, 2: 128}
"""Size of an element in bytes -> elements of a block. With smaller blocks smaller errors are found, and more is
exchanged: 16 bytes for each."""
_FP64 = 1e-12
"""Upper bound of the relative rounding error of the block sums themselves."""


def block_sums(values: torch.Tensor, pieces: int) -> torch.Tensor:
    """Return the sums of blocks, and the sums of magnitudes, as fp64 [2, pieces, blocks of a piece].

    Args:
        values: floating-point numbers, [any shape]; their number is a multiple of ``pieces``.
        pieces: number of pieces of equal size, each of which begins with a new block.
    """
    found = [_sums(blocks) for blocks in _in_blocks(values, pieces)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _in_blocks(values: torch.Tensor, pieces: int) -> list[torch.Tensor]:
    """Return views [pieces, blocks, elements] of the whole blocks and, if elements remain, of the shorter last one."""
    rows, block = values.detach().reshape(pieces, -1), block_of(values)
    whole = rows.shape[1] // block * block
    found = [rows[:, :whole].unflatten(1, (-1, block))] if whole else []
    if whole < rows.shape[1]:
        found.append(rows[:, None, whole:])
    return found


def block_of(values: torch.Tensor) -> int:
    """Return the number of elements of a block."""
    return _BLOCKS.get(values.element_size(), _BLOCKS[4])


def _sums(blocks: torch.Tensor) -> torch.Tensor:
    """Return the sums and the sums of magnitudes, fp64 [2, pieces, blocks], of blocks [pieces, blocks, elements]."""
    is_single = blocks.dtype.itemsize < 8
    if is_single and blocks.device.type == "cpu" and native.library() is not None:
        return native.block_sums(blocks.float())
    magnitudes = torch.linalg.vector_norm(blocks, 1, -1, dtype=torch.float64)
    return torch.stack((blocks.sum(-1, dtype=torch.float64), magnitudes))


class Sums:
    """The sums of one rank in one process group and one iteration.

    Args:
        findings: receives the mismatches.
        group: the process group.
    """

    def __init__(self, findings: Findings, group: dist.ProcessGroup):
        self._findings, self._group = findings, group
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._parts: list[torch.Tensor] = []
        self._results: list[torch.Tensor] = []
        self._limits: list[tuple[float, float, float, float]] = []
        self._places: list[OperatorCall] = []
        self._wrong: torch.Tensor | None = None

    def add(self, part: torch.Tensor, result: torch.Tensor, at: OperatorCall, *, is_mean: bool) -> None:
        """Add a reduction that has ended.

        Args:
            part: the block sums of what this rank has put in.
            result: what it got out: all of it, or its piece in a reduce-scatter.
            at: place of the reduction in the iteration.
            is_mean: whether the result is the mean of the parts, not their sum.
        """
        self._parts.append(part)
        self._results.append(torch.cat([_sums(blocks)[0].flatten() for blocks in _in_blocks(result, 1)]))
        numbers = torch.finfo(result.dtype)
        share = 1.0 / self._size if is_mean else 1.0
        # eps is 2 u, and a mean is rounded once more; below tiny, rounding is no longer relative
        self._limits.append(
            (share, (self._size + 1) * numbers.eps, numbers.tiny * block_of(result) * self._size, numbers.max / 2)
        )
        self._places.append(at)

    def compare(self) -> None:
        """Compare the results with the sums of all ranks' parts, for the flag of ``Findings``. Collective."""
        mine = torch.cat([part.flatten(1) for part in self._parts], dim=1)
        dist.all_reduce(mine, group=self._group)
        expected, first = [], 0
        for part in self._parts:
            _, pieces, blocks = part.shape
            at = first + (self._rank * blocks if pieces > 1 else 0)
            expected.append(mine[:, at : at + blocks])
            first += pieces * blocks
        totals, magnitudes = torch.cat(expected, dim=1)
        found = torch.cat(self._results)
        counts = torch.tensor([len(result) for result in self._results])
        limits = torch.tensor(self._limits, dtype=torch.float64).repeat_interleave(counts, dim=0).to(found.device)
        share, relative, absolute, most = limits.unbind(1)
        is_near = (found - totals * share).abs() <= (relative + _FP64) * magnitudes * share + absolute
        # above, a partial sum may have overflowed, which is no error; what is infinite already is verified elsewhere
        self._wrong = ~is_near & (magnitudes < most)
        rows = self._wrong.long()[:, None].expand(-1, 2)
        self._findings.hint(torch.zeros_like(rows), rows)

    def settle(self) -> None:
        """Note a mismatch for each reduction with a wrong block. Synchronises with the device."""
        if self._wrong is None:
            return
        wrong = self._wrong.tolist()
        first = 0
        for at, result in zip(self._places, self._results, strict=True):
            bad = sum(wrong[first : first + len(result)])
            if bad:
                self._findings.note(Mismatch(at, SUM, note=f"{bad} of {len(result)} blocks"))
            first += len(result)
