"""The layout of named tensors in one flat buffer, for snapshots and state transfers between workers.

A table lists the tensors' types, shapes and offsets. Sender and receiver compare their tables before a transfer.

buffer:  | tensor 0 | pad | tensor 1 | pad | ...        every tensor begins at a multiple of ALIGNMENT bytes
chunks:  | 1 MiB        | 1 MiB        | rest |          every chunk has a checksum of its own
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ft.base import bounded_json
from ft.base.errors import FallbackError

FORMAT = 1
"""Version of encoded tables."""

CHUNK = 1 << 20
ALIGNMENT = 64

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
        *(torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


class BadTable(FallbackError):
    """The bytes are not an encoded table, or the table describes an impossible buffer."""


@dataclass(frozen=True)
class Entry:
    """One tensor in a table.

    Attributes:
        name: name of the tensor.
        dtype: torch's name of its type, such as "float32".
        shape: its shape.
        offset: its position in bytes from the start of the buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _DTYPES[self.dtype].itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor inside ``buffer``, [bytes] uint8."""
        return buffer[self.offset : self.offset + self.nbytes].view(_DTYPES[self.dtype]).view(self.shape)


@dataclass(frozen=True)
class Table:
    """The layout of one buffer.

    Attributes:
        entries: the tensors, in the order of their offsets.
        nbytes: length of the buffer in bytes, padding included.
    """

    entries: tuple[Entry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Table":
        entries, at = [], 0
        for name, tensor in tensors.items():
            entry = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at)
            if entry.dtype not in _DTYPES:
                raise TypeError(f"tensor {name!r} is of type {tensor.dtype}, which snapshots do not know")
            entries.append(entry)
            at = _aligned(at + entry.nbytes)
        return cls(tuple(entries), at)

    @cached_property
    def encoded(self) -> bytes:
        rows = [[e.name, e.dtype, list(e.shape)] for e in self.entries]
        return json.dumps({"format": FORMAT, "tensors": rows}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Table":
        """Return the table that was encoded as ``data``.

        Raises:
            BadTable: the bytes are no table of this format.
        """
        try:
            content = bounded_json.loads(data)
            if content["format"] != FORMAT:
                raise BadTable(f"a table of format {content['format']}; this version reads format {FORMAT}")
            entries, at = [], 0
            for name, dtype, shape in content["tensors"]:
                if dtype not in _DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                    raise BadTable(f"tensor {name!r} of type {dtype} and shape {shape} cannot be")
                entries.append(Entry(str(name), dtype, tuple(shape), at))
                at = _aligned(at + entries[-1].nbytes)
            return cls(tuple(entries), at)
        except (ValueError, KeyError, TypeError) as error:
            raise BadTable(f"not a table of tensors ({type(error).__name__}: {error})") from error

    def difference(self, other: "Table") -> str:
        """Describe the first difference to ``other`` in words; "" if there is none."""
        if len(self.entries) != len(other.entries):
            return f"{len(self.entries)} tensors against {len(other.entries)}"
        for mine, theirs in zip(self.entries, other.entries, strict=True):
            if mine != theirs:
                return f"{mine} against {theirs}"
        return ""


def chunk_count(nbytes: int) -> int:
    """Return the number of chunks of a buffer of ``nbytes`` bytes."""
    return -(-nbytes // CHUNK)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
