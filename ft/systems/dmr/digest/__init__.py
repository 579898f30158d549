"""Digests of tensors for DMR: 128-bit hashes of all bits, by the fastest available backend; and comparison bit by bit.

DMR compares digests on accelerators, and wherever the first result is not kept until the second execution. C, plain
torch and Triton give the same value. A NaN equals a NaN with the same bits, and -0 differs from +0.
"""

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Callable

import torch

from ft.systems.dmr.digest import definition, eager, native

Backend = Callable[[torch.Tensor, int, torch.Tensor], None]
"""A function ``write(tensor, seed, out)`` that writes the digest of ``tensor`` to ``out``, int64 [2] on its device."""


def digest(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a 128-bit digest of a tensor's dtype, shape and every bit, as int64 [2] on its device.

    Two tensors that differ have equal digests with probability <= 2^-64 (``definition.py``). This holds for the whole
    digest only: its low bits alone may be equal although a high bit of the tensors differs. Elements are hashed in
    logical (row-major) order, so that strides do not matter. A tensor that is not contiguous is copied.

    The call does not synchronise with the device, with two exceptions: the first digest with a new seed on a device
    copies the keys there, and the first digest on a type of device tries the backend (see ``backend``).

    Args:
        tensor: the tensor.
        seed: seed of the hash keys, 0 <= seed < 2^128. Only digests with the same seed can be compared. Computing the
            keys of a new seed takes about a millisecond.

    Raises:
        UserError: the seed is out of range, or the tensor is sparse, quantised or meta.
    """
    out = torch.empty(2, dtype=torch.int64, device=tensor.device)
    _backend(tensor.device.type)(tensor, seed, out)
    return out


def writer(device: torch.device | str) -> Backend:
    """Return a function ``write(tensor, seed, out)``: it writes a digest to ``out``, an int64 [2] on ``device``."""
    return _backend(torch.device(device).type)


def backend(device: torch.device | str) -> str:
    """Return the name of the backend for ``device``: "native" (C), "kernel" (Triton) or "eager" (plain torch).

    The first call for a type of device, or the first digest on it, tries the fast backend, which may compile it and
    synchronises with the device.
    """
    return _backend(torch.device(device).type).__module__.rpartition(".")[2]


@functools.cache
def _backend(device_type: str) -> Backend:
    """Return the fastest available backend. It is tried once, and plain torch is returned instead if the trial fails or
    gives another digest than plain torch."""
    fast = _fast(device_type)
    if fast is None:
        return eager.digest
    try:
        fault = None if _agrees(fast, device_type) else "another digest than the definition's: built from other source?"
    except Exception as error:  # Triton passes on any exception of its compiler and of the C compiler
        fault = f"{type(error).__name__}: {error}"
    if fault is None:
        return fast
    print(
        f"ft: digests on {device_type} come from plain torch, slower: {fast.__module__} gave {fault}"
        "\n  fix: run pip install again, with a C compiler on the PATH",
        file=sys.stderr,
    )
    return eager.digest


def _fast(device_type: str) -> Backend | None:
    if device_type == "cpu" and native.library() is not None:
        return native.digest
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        from ft.systems.dmr.digest import kernel

        return kernel.digest
    return None


def _agrees(fast: Backend, device_type: str) -> bool:
    """Return whether ``fast`` and plain torch give the same digest of 50,003 bytes, which are several blocks, two
    levels and a partial last word."""
    tensor = torch.arange(50_003, device=device_type).mul_(40_503).to(torch.uint8)
    both = torch.empty((2, 2), dtype=torch.int64, device=device_type)
    fast(tensor, 0, both[0])
    eager.digest(tensor, 0, both[1])
    return torch.equal(both[0], both[1])


# memcmp is used because torch.equal takes four times as long.
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits. Synchronises with an accelerator.

    Raises:
        UserError: a tensor has no plain memory (sparse, quantised, meta).
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.device.type != "cpu":
        return bool((definition.integers(a) == definition.integers(b)).all())
    if not (a.stride() == b.stride() and _is_dense(a) and a.is_neg() == b.is_neg() and a.is_conj() == b.is_conj()):
        a, b = definition.laid_out(a), definition.laid_out(b)
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
    differences = definition.integers(a) != definition.integers(b)
    if a.is_complex():
        differences = differences.view(-1, 2).any(1)
    return differences.sum()
