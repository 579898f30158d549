"""Tensors for the tests of the digest, and their digests computed with plain torch."""

import torch

from ft.systems.dmr.digest import definition, eager

DTYPES = [getattr(torch, name) for name in definition.DTYPES if hasattr(torch, name)]
LENGTHS = [0, 1, 2, 3, 5, 31, 32, 33, 4095, 4096, 4097, 16384, 16385, 70001]


def anything(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return ``count`` elements of random bits, which include NaN, infinities and subnormals."""
    octets = torch.randint(
        256, (count * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return (octets % 2 if dtype == torch.bool else octets).view(dtype)


def from_eager(tensor: torch.Tensor, seed: int) -> list[int]:
    """Return the digest of ``tensor`` as two integers of 64 bits, computed with plain torch."""
    out = torch.empty(2, dtype=torch.int64, device=tensor.device)
    eager.digest(tensor, seed, out)
    return out.tolist()
