"""Compute the digest of a tensor by a Triton kernel: one launch per level, without synchronisation.

``ft.systems.dmr.digest.definition`` defines this 128-bit hash, with its blocks, levels and keys.

A program hashes ``ROWS`` blocks. Its tile is as wide as the program has lanes, so that a lane keeps its keys for all
rows. The product of a word and a 64-bit key is computed by two multiply-adds on 32-bit halves: ``key = low (signed) +
2^32 high``. The products with the high halves are summed separately, mod 2^32, because higher bits do not affect the
result.

Importing this module requires triton.
"""

import functools

import torch
import triton
import triton.language as tl

from ft.systems.dmr.digest import definition
from ft.systems.dmr.digest.definition import WORDS

WARPS = 8
WIDTH = 1024  # words of a row per step: WARPS * 32 lanes of four
_ROWS = 2  # 79 registers: three programs fit on a multiprocessor, with enough loads in flight to saturate memory
_FEW_BLOCKS = 1024  # below this number a program takes one block, because the device would not be filled otherwise


def digest(tensor: torch.Tensor, seed: int, out: torch.Tensor) -> None:
    """Write the digest of ``tensor`` into ``out``, int64 [2] on the same device.

    The first call compiles the kernel; the first call with a new seed copies its keys to the device.
    """
    halves = _halves(seed, tensor.device)
    head = definition.head(tensor.dtype, tensor.shape, seed)
    words = definition.words(tensor)
    level = 0
    while words.numel() > WORDS:
        numbers = torch.empty(2 * triton.cdiv(words.numel(), WORDS), dtype=torch.int64, device=words.device)
        _launch(words, halves[level], (0, 0), numbers)
        words = numbers.view(torch.int32)
        level += 1
    _launch(words, halves[level], head, out)


@functools.lru_cache(maxsize=8)
def _halves(seed: int, device: torch.device) -> torch.Tensor:
    """Return the halves of the keys as int32 [LEVELS, COLUMNS, 2, WORDS]. They are stored separately so that each is
    loaded as widely as the words."""
    keys = torch.from_numpy(definition.table(seed))
    low = keys.to(torch.int32)
    return torch.stack((low, (keys - low) >> 32), 2).to(torch.int32).to(device)


def _launch(words: torch.Tensor, halves: torch.Tensor, head: tuple[int, ...], numbers: torch.Tensor) -> None:
    blocks = max(1, triton.cdiv(words.numel(), WORDS))
    rows = 1 if blocks < _FEW_BLOCKS else _ROWS
    grid = (triton.cdiv(blocks, rows),)
    with torch.cuda.device_of(words):
        level[grid](words, words.numel(), halves, *head, numbers, blocks, WORDS, rows, WIDTH, num_warps=WARPS)


@triton.jit(do_not_specialize=["head0", "head1", "blocks"])
def level(
    words,
    count: tl.int64,
    halves,
    head0: tl.int64,
    head1: tl.int64,
    numbers,
    blocks: tl.int64,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the sums of the blocks of int32 ``words`` [count], plus the head, to int64 ``numbers`` [blocks, 2].
    ``halves``: the halves of the keys of one level."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    low0 = tl.zeros((ROWS, WIDTH), tl.int64)
    low1 = tl.zeros((ROWS, WIDTH), tl.int64)
    high0 = tl.zeros((ROWS, WIDTH), tl.int32)
    high1 = tl.zeros((ROWS, WIDTH), tl.int32)
    for start in range(0, WORDS, WIDTH):
        at = row[:, None] * WORDS + (start + column)
        word = tl.load(words + at, mask=at < count, other=0, eviction_policy="evict_first")
        key = halves + start + column
        wide = word.to(tl.int64)
        low0 += wide * tl.load(key).to(tl.int64)
        high0 += word * tl.load(key + WORDS)
        low1 += wide * tl.load(key + 2 * WORDS).to(tl.int64)
        high1 += word * tl.load(key + 3 * WORDS)
    number0 = tl.sum(low0 + (high0.to(tl.int64) << 32), 1) + head0
    number1 = tl.sum(low1 + (high1.to(tl.int64) << 32), 1) + head1
    tl.store(numbers + 2 * row, number0, mask=row < blocks)
    tl.store(numbers + 2 * row + 1, number1, mask=row < blocks)
