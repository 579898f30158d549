"""Bitwise comparison: NaN equals itself, and -0 is not +0."""

import ctypes

import torch

from ft.dmr.digest import bits

# torch.equal takes four times as long.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int


def compare(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Whether two tensors have the same dtype, shape and bits: bool [] on their device, without synchronisation.

    Raises:
        UserError: one has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return torch.zeros((), dtype=torch.bool, device=a.device)
    if a.device.type == "cpu" == b.device.type:
        ours, theirs = bits.laid_out(a), bits.laid_out(b)
        return torch.tensor(_memcmp(ours.data_ptr(), theirs.data_ptr(), ours.nbytes) == 0)
    return (bits.integers(a) == bits.integers(b)).all()


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many elements of two tensors of one dtype and shape differ: int64 [] on their device, not synchronised.

    Raises:
        ValueError: another dtype or shape.
        UserError: one has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}: elements cannot be counted")
    differences = bits.integers(a) != bits.integers(b)
    if a.is_complex():
        differences = differences.view(-1, 2).any(1)
    return differences.sum()
