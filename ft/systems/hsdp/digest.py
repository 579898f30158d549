"""Checksum of the training state of an FT-HSDP replica, by which replicas can be compared bit for bit after a step."""

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ft.state.groups.tree import Tree

_BITS = 62


def digest(tensors: Mapping[str, torch.Tensor], tree: Tree) -> int:
    """Return the digest of the tensors of all ranks of ``tree``. All ranks have to call it, and get the same digest.

    Each rank's contribution depends on names, order, every bit, and the rank.
    """
    word = tree.rank + 1
    for name in sorted(tensors):
        word = zlib.crc32(name.encode(), word)
        content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        word = zlib.crc32(content.numpy(), word)
    mixed = torch.tensor([word * 0x9E3779B97F4A7C15 % (1 << _BITS) >> 16], dtype=torch.int64, device="cpu")
    tree.all_reduce(mixed, dist.ReduceOp.SUM)
    return int(mixed.item())
