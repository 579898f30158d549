"""Compute digests and sums of tensors on the CPU by a library in C, for DMR (SpareTrain).

A digest is the 128-bit hash that ``ft.systems.dmr.digest.definition`` defines.

``setup.py`` builds the library if there is a C compiler. Without it, plain torch computes the same, slower.
"""

import ctypes
import functools
import importlib.machinery
import os
import sys
from pathlib import Path

import numpy as np
import torch

from ft.systems.dmr.digest import definition

NAME = "_native"
_FAILURES = {1: "no memory for the numbers of its blocks", 2: "it is longer than 16 TiB"}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library in this folder; if it was not built, print a warning on stderr, once, and return None."""
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(NAME + suffix)
        if path.exists():
            try:
                return load(path)
            except (OSError, AttributeError) as error:  # AttributeError: it was built from older sources
                return _missing(str(error))
    return _missing("it was not built: setup.py found no C compiler, or nothing was installed")


def load(path: Path) -> ctypes.CDLL:
    """Load the library at ``path``.

    Raises:
        OSError: the file is not a library for this machine.
        AttributeError: it lacks a function.
    """
    loaded = ctypes.CDLL(os.fspath(path))
    pointer, count = ctypes.c_void_p, ctypes.c_uint64
    numbers = [ctypes.c_int64, ctypes.c_int64]
    loaded.ft_digest.argtypes = [pointer, count, pointer, *numbers, pointer, ctypes.c_int, ctypes.c_int]
    loaded.ft_digest.restype = ctypes.c_int
    loaded.ft_block_sums.argtypes = [pointer, count, count, pointer, pointer]
    loaded.ft_block_sums.restype = None
    loaded.ft_widest.argtypes, loaded.ft_widest.restype = [], ctypes.c_int
    loaded.width = loaded.ft_widest()
    return loaded


def digest(
    tensor: torch.Tensor,
    seed: int,
    out: torch.Tensor,
    using: ctypes.CDLL | None = None,
    threads: int | None = None,
    width: int | None = None,
) -> None:
    """Write the digest of a CPU tensor into ``out``, int64 [2].

    Args:
        using: the library; None for the one in this folder, which has to exist.
        threads: maximum number of threads, each of which gets at least 2 MiB; None for torch's number of threads.
        width: vector instructions to use: 512 (AVX-512), 2 (AVX2) or 0 (none); None for the widest available.

    Raises:
        MemoryError: the library could not allocate memory, or the tensor is longer than 16 TiB.
    """
    using = using or library()
    memory = definition.laid_out(tensor)
    _table, address = _keys(seed)
    failed = using.ft_digest(
        memory.data_ptr(),
        memory.nbytes,
        address,
        *definition.head(tensor.dtype, tensor.shape, seed),
        out.data_ptr(),
        torch.get_num_threads() if threads is None else threads,
        using.width if width is None else width,
    )
    if failed:
        raise MemoryError(f"a tensor of {memory.nbytes} bytes has no digest: {_FAILURES[failed]}")


def block_sums(blocks: torch.Tensor, using: ctypes.CDLL | None = None) -> torch.Tensor:
    """Return the sum of each block of numbers and the sum of their magnitudes, fp64 [2, pieces, blocks], of fp32
    [pieces, blocks, numbers] on the CPU, contiguous in the last two dimensions."""
    using = using or library()
    pieces, count, length = blocks.shape
    found = torch.empty((pieces, 2, count), dtype=torch.float64)
    for piece, out in zip(blocks, found, strict=True):
        using.ft_block_sums(piece.data_ptr(), count, length, out[0].data_ptr(), out[1].data_ptr())
    return found.transpose(0, 1)


@functools.lru_cache(maxsize=8)
def _keys(seed: int) -> tuple[np.ndarray, int]:
    """Return the key table of a seed and its memory address. The caller must keep the table alive while it uses the
    address."""
    table = definition.table(seed)
    return table, table.ctypes.data


def _missing(why: str) -> None:
    print(
        f"ft: the C library for digests is not there ({why}); plain torch computes the same, slower."
        "\n  fix: install a C compiler and run pip install again",
        file=sys.stderr,
    )
