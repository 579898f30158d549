"""Compute the digest of a tensor with plain torch operators: on every device, without a compiler and without
synchronisation.

``ft.systems.dmr.digest.definition`` defines this 128-bit hash.
"""

import torch

from ft.systems.dmr.digest import definition
from ft.systems.dmr.digest.definition import WORDS

# Number of blocks that are processed at once. On a CPU, the blocks widened to 64 bits should fit into the cache. On a
# GPU, the number is larger so that few kernels are launched, and limited because the widened blocks take memory.
_CPU_BLOCKS = 32
_DEVICE_BLOCKS = 512


def digest(tensor: torch.Tensor, seed: int, out: torch.Tensor) -> None:
    """Write the digest of ``tensor`` into ``out``, int64 [2] on the same device."""
    keys = definition.keys(seed, tensor.device)
    words = definition.words(tensor)
    level = 0
    while words.numel() > WORDS:
        words = _level(words, keys[level]).reshape(-1).view(torch.int32)
        level += 1
    last = _level(words, keys[level])[0]
    for column, number in enumerate(definition.head(tensor.dtype, tensor.shape, seed)):
        torch.add(last[column], number, out=out[column])


def _level(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the two sums of products with the keys for each block of ``words``, int32 [n], as int64 [max(1, ceil(n /
    WORDS)), 2]."""
    whole, rest = divmod(words.numel(), WORDS)
    numbers = words.new_empty((max(1, whole + (rest > 0)), 2), dtype=torch.int64)
    step = min(max(1, whole), _CPU_BLOCKS if words.device.type == "cpu" else _DEVICE_BLOCKS)
    room = words.new_empty((2, step, WORDS), dtype=torch.int64)  # allocated once: allocators do not cache this size
    for first in range(0, whole, step):
        last = min(first + step, whole)
        _sums(words[first * WORDS : last * WORDS].view(-1, WORDS), keys, numbers[first:last], room[:, : last - first])
    if rest or not whole:
        _sums(words[whole * WORDS :].view(1, rest), keys[:, :rest], numbers[whole:], room[:, :1, :rest])
    return numbers


def _sums(blocks: torch.Tensor, keys: torch.Tensor, numbers: torch.Tensor, room: torch.Tensor) -> None:
    wide, product = room
    wide.copy_(blocks)
    for column in range(2):
        torch.sum(torch.mul(wide, keys[column], out=product), 1, out=numbers[:, column])
