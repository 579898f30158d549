"""Define the digest of a tensor, a 128-bit multilinear hash, with its keys and the proof of its error bound; and view
the bits of a tensor as integers in logical (row-major) order, copied only if its memory is not in that order already.

All backends (C, plain torch, Triton) compute exactly this function.

A tensor's bytes, in logical (row-major) order and padded with zeros, are little-endian signed 32-bit words ``w[0],
w[1], ...``, divided into blocks of ``WORDS`` words. A block is hashed to two 64-bit numbers, one per column ``c``::

    h[c] = sum over i of K[level][c][i] * w[i]        (mod 2^64; the multilinear hash of Lemire and Kaser,
                                                       "Strongly universal string hashing is fast", 2014)

The concatenated numbers of all blocks are the words of the next level, which has its own keys, until one block is left.
The hash of the head (the dtype and the shape), with separate keys, is added to the two numbers of this block.

**Proof.** Let two different tensors have equal heads. At level 0 some block differs; let ``d[i]`` be the differences of
its words, not all zero. Since ``|d[i]| < 2^32``, a ``d[j]`` that is not zero is ``2^t * odd`` with ``t <= 31``.
Whatever the other keys are, ``K[j] * d[j]`` has one value mod 2^64 for at most ``2^t`` of the ``2^64`` keys ``K[j]``: a
column agrees with probability ``<= 2^-33``, and both columns with ``<= 2^-66``, because their keys are independent. If
the blocks' numbers differ, the same holds for the next level, whose keys are independent again. With at most ``LEVELS``
levels, two different tensors have equal digests with probability ``<= LEVELS * 2^-66 = 2^-64``. If the heads differ,
the same argument applies to the head's keys. The bound holds for uniformly drawn keys, whatever the two tensors are.
The actual keys are SHAKE-256 of the seed, which is equivalent for anything that cannot distinguish SHAKE-256 from
random numbers, as hardware faults cannot.

The sums are integers mod 2^64, so that their order, and with it the number of threads, does not affect the result.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch

from ft.base.errors import UserError

WORD_BYTES = 4
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are in logical order in memory: ``tensor`` itself if possible, else a copy.

    Raises:
        UserError: the tensor has no plain memory (sparse, quantised, meta).
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantised" if tensor.is_quantized else tensor.layout
        raise UserError(f"a {kind} tensor has no bits to digest or compare", "give a dense tensor")
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in logical order, flattened to one dimension and detached from its graph."""
    return laid_out(tensor).detach().reshape(-1)


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of every element as an integer of the same width, in logical order [elements]. A complex element
    gives two integers, for its real and imaginary parts."""
    flat = in_order(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the tensor in logical order as int32 [ceil(bytes / 4)], padded with zeros. Copy only if the
    memory is not in logical order, is not aligned to 4 bytes, or needs padding."""
    flat = in_order(tensor)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=flat.device)
    octets = flat.view(torch.uint8)
    missing = -octets.numel() % WORD_BYTES
    if missing:
        octets = torch.nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % WORD_BYTES or octets.data_ptr() % WORD_BYTES:
        octets = octets.clone()
    return octets.view(torch.int32)


WORDS = 4096
LEVELS = 4  # 16 KiB, 16 MiB, 16 GiB, 16 TiB
COLUMNS = 2
_MAX_DIMENSIONS = 64  # torch's own limit
_HEAD_WORDS = 2 + 2 * _MAX_DIMENSIONS
_SEED_BYTES = 16

# The position of a dtype in this list is part of the digest's value: append new dtypes at the end.
DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]
_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES) if hasattr(torch, name)}


def _drawn(seed: int, purpose: bytes, count: int) -> np.ndarray:
    if not 0 <= seed < 1 << 8 * _SEED_BYTES:
        raise UserError(f"a digest's seed is {seed}", f"give a whole number from 0 to 2^{8 * _SEED_BYTES} - 1")
    source = hashlib.shake_256(b"megatron-ft digest " + purpose + seed.to_bytes(_SEED_BYTES, "little"))
    return np.frombuffer(source.digest(8 * count), dtype="<i8").copy()


@lru_cache(maxsize=8)
def table(seed: int) -> np.ndarray:
    """Return the keys of the blocks for a seed as int64 [LEVELS, COLUMNS, WORDS]. They take 256 KiB, are computed in
    about a millisecond, and are cached.

    Raises:
        UserError: the seed is negative or longer than 128 bits.
    """
    return _drawn(seed, b"keys", LEVELS * COLUMNS * WORDS).reshape(LEVELS, COLUMNS, WORDS)


@lru_cache(maxsize=8)
def keys(seed: int, device: torch.device) -> torch.Tensor:
    """Return ``table(seed)`` on a device. The first call waits for the copy; later calls are cached."""
    return torch.from_numpy(table(seed)).to(device)


@lru_cache(maxsize=8)
def _head_keys(seed: int) -> list[list[int]]:
    return _drawn(seed, b"head", COLUMNS * _HEAD_WORDS).reshape(COLUMNS, _HEAD_WORDS).tolist()


@lru_cache(maxsize=4096)
def head(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return the hash of the dtype and the shape, which is added to the digest: one signed 64-bit number per column.

    Raises:
        UserError: digests of this dtype are not defined (quantised, for example), or the seed is out of range.
    """
    if dtype not in _CODES:
        known = ", ".join(str(known).removeprefix("torch.") for known in _CODES)
        raise UserError(f"a digest of {dtype} is not defined", f"give a tensor of one of: {known}")
    halves = [half for size in shape for half in (size & 0xFFFFFFFF, size >> 32)]
    words = [_CODES[dtype], len(shape), *halves]
    return tuple(
        signed(sum(key * word for key, word in zip(column, words, strict=False))) for column in _head_keys(seed)
    )


def signed(number: int) -> int:
    """Return ``number`` mod 2^64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
