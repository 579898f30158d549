"""Compare tensors bit by bit, for DMR (SpareTrain), which executes operators twice and compares the results.

A NaN equals a NaN with the same bits, and -0 differs from +0.
"""

import ctypes

import torch

from ft.systems.dmr.digest import bits

# memcmp is used because torch.equal takes four times as long.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int


def compare(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors have the same dtype, shape and bits, as bool [] on their device. On accelerators it
    does not synchronise.

    Raises:
        UserError: a tensor has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return torch.zeros((), dtype=torch.bool, device=a.device)
    if a.device.type == "cpu" == b.device.type:
        return torch.tensor(same(a, b))
    return (bits.integers(a) == bits.integers(b)).all()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return the result of ``compare`` for two tensors on the CPU, as a bool.

    Raises:
        UserError: a tensor has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.stride() == b.stride() and _is_dense(a) and a.is_neg() == b.is_neg() and a.is_conj() == b.is_conj()):
        a, b = bits.laid_out(a), bits.laid_out(b)
    return _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one piece of memory without gaps, in whatever order."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return False
    if tensor.is_contiguous():
        return True
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel() and all(tensor.stride())


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the number of differing elements of two tensors of one dtype and shape, as int64 [] on their device,
    without synchronising.

    Raises:
        ValueError: the tensors differ in dtype or shape.
        UserError: a tensor has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}: elements cannot be counted")
    differences = bits.integers(a) != bits.integers(b)
    if a.is_complex():
        differences = differences.view(-1, 2).any(1)
    return differences.sum()
