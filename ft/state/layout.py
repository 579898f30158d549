"""The layout of named tensors in one flat buffer, for snapshots and state transfers between workers.

A :class:`StateMemory` is a state laid out so. Live tensors are one, too (:class:`FlatState`): a range within one tensor
in host memory is accessed in place, and a range over several tensors, or on a device, is copied through a scratch
buffer.

A table lists the tensors' types, shapes and offsets. Sender and receiver compare their tables before a transfer.

buffer:  | tensor 0 | pad | tensor 1 | pad | ...        every tensor begins at a multiple of ALIGNMENT bytes
chunks:  | 1 MiB        | 1 MiB        | rest |          every chunk has a checksum of its own
"""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ft.base import bounded_json
from ft.base.errors import FallbackError, UserError
from ft.net.framed import checksum
from ft.state import device as devices

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
class TensorEntry:
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

    entries: tuple[TensorEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Table":
        entries, at = [], 0
        for name, tensor in tensors.items():
            entry = TensorEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at)
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
                entries.append(TensorEntry(str(name), dtype, tuple(shape), at))
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


class StateMemory:
    """The bytes of a state in memory.

    Attributes:
        table: layout of the tensors.
    """

    table: Table

    def whole(self, start: int, stop: int) -> memoryview | None:
        """Return the bytes [start, stop) in place; None if they are not one contiguous range of host memory."""
        raise NotImplementedError

    def gather(self, start: int, stop: int, scratch: memoryview) -> None:
        """Copy the bytes [start, stop), which are not in place, to ``scratch``, which has that length."""
        raise NotImplementedError

    def scatter(self, start: int, stop: int, scratch: memoryview) -> None:
        """Copy ``scratch`` to the bytes [start, stop), which are not in place."""
        raise NotImplementedError

    def checksum(self, start: int, chunk: memoryview) -> int:
        """Return the checksum of ``chunk``, the bytes from ``start`` on."""
        raise NotImplementedError

    def note(self, start: int, check: int) -> None:
        """Take note of the checksum of the chunk that was received at ``start``."""
        raise NotImplementedError


class FlatState(StateMemory):
    """Live tensors, laid out in the order of their names. Gaps between tensors read as zeros.

    Raises:
        UserError: a tensor has an unsupported type or is not contiguous.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self.table = table_of(tensors)
        self._offsets = [entry.offset for entry in self.table.entries]
        self._runs = [_bytes_of(entry.name, tensors[entry.name]) for entry in self.table.entries]

    def whole(self, start: int, stop: int) -> memoryview | None:
        pieces = list(self._pieces(start, stop))
        if len(pieces) != 1:
            return None
        run, _, begin, end = pieces[0]
        return run[begin:end] if end - begin == stop - start and isinstance(run, memoryview) else None

    def gather(self, start: int, stop: int, scratch: memoryview) -> None:
        scratch[:] = bytes(len(scratch))
        for run, at, begin, end in self._pieces(start, stop):
            target = scratch[at : at + end - begin]
            if isinstance(run, memoryview):
                target[:] = run[begin:end]
            else:
                devices.enter(run.device)
                torch.frombuffer(target, dtype=torch.uint8).copy_(run[begin:end])

    def scatter(self, start: int, stop: int, scratch: memoryview) -> None:
        for run, at, begin, end in self._pieces(start, stop):
            source = scratch[at : at + end - begin]
            if isinstance(run, memoryview):
                run[begin:end] = source
            else:
                devices.enter(run.device)
                run[begin:end].copy_(torch.frombuffer(source, dtype=torch.uint8))

    def checksum(self, start: int, chunk: memoryview) -> int:
        return checksum(chunk)

    def note(self, start: int, check: int) -> None:
        """Do nothing: checksums of live tensors are computed when they are sent."""

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[memoryview | torch.Tensor, int, int, int]]:
        """Yield the part of each tensor that lies in [start, stop).

        Yields:
            (bytes of the whole tensor, offset of the part in the range, first byte of the part in the tensor, end of
            the part in the tensor).
        """
        index = max(0, bisect_right(self._offsets, start) - 1)
        while index < len(self._offsets) and self._offsets[index] < stop:
            run, offset = self._runs[index], self._offsets[index]
            begin, end = max(0, start - offset), min(len(run), stop - offset)
            if begin < end:
                yield run, offset + begin - start, begin, end
            index += 1


def table_of(tensors: Mapping[str, torch.Tensor]) -> Table:
    """Return the layout of ``tensors``.

    Raises:
        UserError: as for :class:`FlatState`.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise UserError(
                f"tensor {name!r} of shape {list(tensor.shape)} is not contiguous: it is no run of bytes",
                "hand over the contiguous tensor that it is a view of",
            )
    try:
        return Table.of(dict(sorted(tensors.items())))
    except TypeError as error:
        raise UserError(str(error), "leave it out, or view it as a type of the same width") from error


def _bytes_of(name: str, tensor: torch.Tensor) -> memoryview | torch.Tensor:
    flat = tensor.detach().view(-1).view(torch.uint8)
    if flat.device.type == "meta":
        raise UserError(f"tensor {name!r} has no memory (device meta)", "materialize it first")
    return memoryview(flat.numpy().data) if flat.device.type == "cpu" else flat
