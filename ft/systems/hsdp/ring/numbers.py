"""Schedule and arithmetic of FT-HSDP's ring all-reduce (FT-HSDP, section 4.2): which elements each member sends to its
right neighbour, in which order and format, and the addition of received chunks.

With N members, chunks of S elements and C chunks per member, the tensor is cut into partitions of at most S x C x N
elements, and each partition into N parts, one for each member. A partition takes 2N-2 steps. In steps 0 to N-2
(reduce-scatter), each member sends the part to which it has just added its own values, beginning with the part of its
own index. In steps N-1 to 2N-3 (all-gather), the finished parts are passed around the ring. A part is sent in C chunks,
so that one chunk is forwarded while the next one is received.

All members get equal bits: the sum of a part begins at the member whose index is that of the part and goes around the
ring. The last member adds its values, scales and rounds once, and the other members copy its result.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ft.base.errors import UserError


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk to send and the chunk to receive at the same time, as ranges of elements of the tensor.

    Attributes:
        step: step within the partition, 0 to 2N-3.
        send: (first element, end) of the chunk to send; the end is exclusive.
        receive: (first element, end) of the chunk to receive; the end is exclusive.
        needs: index of the item that must have been received before this one is sent; -1: none.
    """

    step: int
    send: tuple[int, int]
    receive: tuple[int, int]
    needs: int


@lru_cache(maxsize=256)
def items(elements: int, members: int, me: int, chunk: int, chunks: int) -> tuple[Item, ...]:
    """Return all items of one all-reduce, in the order in which their chunks are sent and received.

    Item i of a member is received as item i of its right neighbour, with the same number of elements.

    Args:
        members: N, the number of members, at least 2.
        chunks: C, the number of chunks of a part.
    """
    found: list[Item] = []
    for first in range(0, elements, chunk * chunks * members):
        behind = min(first + chunk * chunks * members, elements)
        found += _partition(first, behind, members, me, chunk, base=len(found))
    return tuple(found)


def _partition(first: int, behind: int, members: int, me: int, chunk: int, base: int) -> list[Item]:
    bounds = [first + (behind - first) * part // members for part in range(members + 1)]
    largest = max(bounds[part + 1] - bounds[part] for part in range(members))
    count = -(-largest // chunk)

    def piece(part: int, index: int) -> tuple[int, int]:
        low, size = bounds[part], bounds[part + 1] - bounds[part]
        return low + size * index // count, low + size * (index + 1) // count

    found = []
    for step in range(2 * members - 2):
        out, into = (me - step) % members, (me - step - 1) % members
        for index in range(count):
            needs = base + len(found) - count if step else -1
            found.append(Item(step, piece(out, index), piece(into, index), needs))
    return found


_WIDE = 4
"""Bytes of an fp32 element; fp32 is the type in which sums are kept."""

TYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Types that can be reduced, with their codes on the wire."""


def check(tensor: torch.Tensor) -> None:
    """Raise UserError if ``tensor`` cannot be reduced in place."""
    if tensor.dtype not in TYPES:
        raise UserError(f"an all-reduce of {tensor.dtype}", "the ring reduces float32 and bfloat16")
    if tensor.device.type not in ("cpu", "cuda"):
        raise UserError(f"an all-reduce of a tensor on {tensor.device}", "the ring reduces on cpu and cuda")
    if not tensor.is_contiguous():
        raise UserError(
            f"an all-reduce of a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}",
            "give a contiguous one",
        )


class Buffers:
    """Buffers of a ring, allocated once.

    Args:
        chunk: size of a chunk, in fp32 elements.

    Attributes:
        received: one received chunk for each stream, fp32 of shape (streams, chunk).
    """

    def __init__(self, chunk: int, chunks: int, streams: int):
        self.received = torch.zeros(streams, chunk)
        self._shape = 2 * chunks, chunk
        self._waiting: torch.Tensor | None = None

    def waiting(self) -> torch.Tensor:
        """Return the buffer for fp32 sums of bf16 tensors that wait to be sent, of shape (slots, chunk)."""
        if self._waiting is None:
            self._waiting = torch.zeros(self._shape)
        return self._waiting


class ReducedTensor(ABC):
    """One tensor during its all-reduce, with the buffers and the addition for its chunks.

    An item is one chunk to send and one chunk to receive (:class:`ft.systems.hsdp.ring.numbers.Item`). ``index`` is
    the number of an item in the order of the all-reduce, and ``stream`` the number of the data connection.

    Attributes:
        is_busy: whether a device still works on chunks, so that :meth:`added` may report some later.
    """

    is_busy = False

    @abstractmethod
    def outgoing(self, index: int, item: Item) -> memoryview:
        """Return the bytes of item ``index`` to send to the right neighbour."""

    @abstractmethod
    def incoming(self, index: int, item: Item, stream: int) -> memoryview:
        """Return the buffer into which the chunk of item ``index`` is received from the left neighbour."""

    @abstractmethod
    def take(self, index: int, item: Item, stream: int) -> bool:
        """Process the received chunk of item ``index``: add it to this member's values.

        A final result (all-gather) is only stored in the tensor, unless it was received there.

        Returns:
            Whether the result may be sent on. If not, :meth:`added` reports the item later.
        """

    def added(self, wait: bool) -> Sequence[int]:
        """Return the items whose results may be sent on since the last call.

        Args:
            wait: wait until the device has done at least one more piece of work.
        """
        return ()

    def can_send(self, index: int) -> bool:
        """Return whether the bytes of item ``index``, which does not depend on another one, are in host memory."""
        return True

    def went(self, index: int, item: Item) -> None:
        """Note that item ``index`` has been sent."""
        return

    def has_room(self, index: int, item: Item, sent: int) -> bool:
        """Return whether item ``index`` may be received when the first ``sent`` items have been sent."""
        return True


def of(tensor: torch.Tensor, scale: float, members: int, buffers: Buffers) -> ReducedTensor:
    """Return the arithmetic for ``tensor`` in host memory, whose sum over ``members`` is multiplied by ``scale``."""
    return (InPlace if tensor.dtype == torch.float32 else Widened)(tensor, scale, members, buffers)


class InPlace(ReducedTensor):
    """fp32 tensors: sums are computed in the tensor's memory and sent from there."""

    def __init__(self, tensor: torch.Tensor, scale: float, members: int, buffers: Buffers):
        self._elements, self._width = tensor.detach().view(-1), tensor.element_size()
        self._bytes = memoryview(self._elements.view(torch.uint8).numpy())
        self._received = buffers.received
        self._received_bytes = [memoryview(each.view(torch.uint8).numpy()) for each in buffers.received]
        self._scale, self._last = scale, members - 2

    def outgoing(self, index: int, item: Item) -> memoryview:
        first, behind = item.send
        return self._bytes[first * self._width : behind * self._width]

    def incoming(self, index: int, item: Item, stream: int) -> memoryview:
        first, behind = item.receive
        if item.step <= self._last:
            return self._received_bytes[stream][: (behind - first) * self._width]
        return self._bytes[first * self._width : behind * self._width]

    def take(self, index: int, item: Item, stream: int) -> bool:
        if item.step <= self._last:
            self._sum(index, item, stream)
        return True

    def _sum(self, index: int, item: Item, stream: int) -> None:
        """Add a received chunk of partial sums to this member's values, and scale the last sum."""
        first, behind = item.receive
        own = self._elements[first:behind].numpy()
        np.add(self._received[stream, : behind - first].numpy(), own, out=own)
        if item.step == self._last and self._scale != 1:
            np.multiply(own, np.float32(self._scale), out=own)


class Widened(InPlace):
    """bf16 tensors: inputs and results are sent in bf16, intermediate sums in fp32, so that a sum is rounded once."""

    def __init__(self, tensor: torch.Tensor, scale: float, members: int, buffers: Buffers):
        super().__init__(tensor, scale, members, buffers)
        self._waiting = buffers.waiting()
        self._slots = len(self._waiting)
        self._waiting_bytes = [memoryview(each.view(torch.uint8).numpy()) for each in self._waiting]

    def outgoing(self, index: int, item: Item) -> memoryview:
        first, behind = item.send
        if 0 < item.step <= self._last:
            return self._waiting_bytes[item.needs % self._slots][: (behind - first) * _WIDE]
        return super().outgoing(index, item)

    def incoming(self, index: int, item: Item, stream: int) -> memoryview:
        first, behind = item.receive
        if 0 < item.step <= self._last:
            return self._received_bytes[stream][: (behind - first) * _WIDE]
        return super().incoming(index, item, stream)

    def has_room(self, index: int, item: Item, sent: int) -> bool:
        # The slot held item index - 2C, which was sent as one of the C items after that one.
        return item.step >= self._last or sent > index - self._slots // 2

    def _sum(self, index: int, item: Item, stream: int) -> None:
        first, behind = item.receive
        size, own = behind - first, self._elements[first:behind]
        got = (self._received if item.step else self._received.view(own.dtype))[stream, :size]
        if item.step < self._last:
            self._waiting[index % self._slots, :size].copy_(own).add_(got)
        elif item.step:
            own.copy_(got.add_(own) if self._scale == 1 else got.add_(own).mul_(self._scale))
        elif self._scale == 1:  # two members: torch adds in fp32, and rounds once
            own.add_(got)
        else:
            own.copy_(self._waiting[0, :size].copy_(own).add_(got).mul_(self._scale))
