"""Named tensors viewed as one contiguous range of bytes, so that a state fetch can split them by bytes.

The layout is a :class:`ft.state.layout.Table`. A range within one tensor in host memory is accessed in place.
A range over several tensors, or on a device, is copied through a scratch buffer of the range's length. Gaps between
tensors read as zeros.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

import torch

from ft.base.errors import UserError
from ft.net.framed import checksum
from ft.state import device as devices
from ft.state.layout import Table
from ft.state.transfer.moving import Memory


class FlatState(Memory):
    """Byte-range view of ``tensors``, laid out in the order of their names.

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
