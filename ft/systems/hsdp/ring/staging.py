"""FT-HSDP's ring all-reduce of tensors on a GPU: chunks are staged in pinned host memory, because the ring's sockets
read and write host memory only.

Copies and additions are queued on a separate CUDA stream. A received chunk stays in a staging buffer until the device
has added this member's values, and a sum stays in a slot of another buffer until it is sent. The tensor itself is read
once and written once per chunk.
"""

import contextlib
from collections.abc import Callable

import torch

from ft.systems.hsdp.ring.numbers import Buffers, Numbers
from ft.systems.hsdp.ring.schedule import Item

Add = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor | None], None]
"""(received, own, scale, into, also) -> None: set ``into``, and ``also`` if given, to (received + own) x scale."""


def add_in_passes(
    received: torch.Tensor, own: torch.Tensor, scale: float, into: torch.Tensor, also: torch.Tensor | None
) -> None:
    """Compute the same as :func:`ft.systems.hsdp.ring.fused.add` in several passes, where Triton is not available."""
    total = received.to(own.device, torch.float32, non_blocking=True).add_(own)
    if scale != 1:
        total.mul_(scale)
    into.copy_(total, non_blocking=True)
    if also is not None:
        also.copy_(into, non_blocking=True)


def best_add(device: torch.device) -> Add:
    """Return the fused kernel on CUDA with Triton, else :func:`add_in_passes`."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from ft.systems.hsdp.ring.fused import add

            return add
    return add_in_passes


class Staging:
    """CUDA stream and pinned buffers of a ring for the tensors on one device.

    Args:
        device: the device; on a CPU (in tests), there is no stream and no pinned memory.
        buffers: host buffers of the ring, whose sizes are used.
        streams: number of data connections to a neighbour.

    Attributes:
        is_cuda: whether the device is a CUDA device.
        stream: the CUDA stream, None on other devices.
        slots: number of sums that can wait to be sent.
        add: function that adds a received chunk.
        first: buffer for chunks of the tensor that are sent unchanged, fp32 of shape (streams, chunk).
        received: buffer for received chunks, fp32 of shape (streams, chunk).
        waiting: buffer for sums that wait to be sent, fp32 of shape (slots, chunk).
    """

    def __init__(self, device: torch.device, buffers: Buffers, streams: int):
        self.is_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None
        self.slots, self.add = buffers.slots, best_add(device)
        chunk = buffers.received.shape[1]
        self.first, self.received, self.waiting = (
            torch.zeros(rows, chunk, pin_memory=self.is_cuda) for rows in (streams, streams, self.slots)
        )

    def on_stream(self) -> contextlib.AbstractContextManager:
        """Return a context in which work is queued on the stream."""
        return torch.cuda.stream(self.stream) if self.is_cuda else contextlib.nullcontext()

    def follow(self) -> None:
        """Make the stream wait for the work queued on the current stream, which produces the tensor."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def wait(self) -> None:
        """Wait until the work queued on the stream is done."""
        if self.stream is not None:
            self.stream.synchronize()


class Staged(Numbers):
    """One tensor on a device during its all-reduce. Results have the same bits as those of a tensor in host memory.

    Args:
        tensor: the tensor.
        scale: factor by which the sum is multiplied.
        members: number of members of the ring.
        wide_sums: whether sums of bf16 are sent in fp32 (:class:`ft.systems.hsdp.ring.options.RingOptions`).
        staging: stream and buffers of the tensor's device.
    """

    def __init__(self, tensor: torch.Tensor, scale: float, members: int, wide_sums: bool, staging: Staging):
        self._elements, self._staging = tensor.detach().view(-1), staging
        self._scale, self._last = scale, members - 2
        self._own = tensor.dtype
        self._sums = torch.float32 if wide_sums else tensor.dtype
        self._streams = staging.first.shape[0]

    def outgoing(self, index: int, item: Item) -> memoryview:
        first, behind = item.send
        if item.step:
            return _bytes(self._slot(item.needs, behind - first, self._type(item.step)))
        chunk = staged(self._staging.first[index % self._streams], behind - first, self._own)
        with self._staging.on_stream():
            chunk.copy_(self._elements[first:behind], non_blocking=True)
        self._staging.wait()
        return _bytes(chunk)

    def incoming(self, item: Item, stream: int) -> memoryview:
        return _bytes(self._came(item, stream))

    def has_room(self, index: int, item: Item, sent: int) -> bool:
        return item.step == 2 * self._last + 1 or sent > index - self._staging.slots // 2

    def take(self, index: int, item: Item, stream: int) -> None:
        first, behind = item.receive
        own, got = self._elements[first:behind], self._came(item, stream)
        onward = self._slot(index, behind - first, self._type(item.step + 1))
        with self._staging.on_stream():
            if item.step < self._last:
                self._staging.add(got, own, 1.0, onward, None)
            elif item.step == self._last:
                self._staging.add(got, own, self._scale, own, onward)
            else:
                own.copy_(got, non_blocking=True)
        if self._last < item.step <= 2 * self._last:
            onward.copy_(got)
        self._staging.wait()

    def _type(self, step: int) -> torch.dtype:
        """Return the type of elements on the wire in ``step``."""
        return self._sums if 0 < step <= self._last else self._own

    def _came(self, item: Item, stream: int) -> torch.Tensor:
        first, behind = item.receive
        return staged(self._staging.received[stream], behind - first, self._type(item.step))

    def _slot(self, index: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return staged(self._staging.waiting[index % self._staging.slots], size, dtype)


def staged(room: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first ``size`` elements of ``dtype`` in a buffer."""
    return room.view(dtype)[:size]


def _bytes(chunk: torch.Tensor) -> memoryview:
    return memoryview(chunk.view(torch.uint8).numpy())
