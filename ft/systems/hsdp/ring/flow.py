"""The all-reduce of one tensor over the connections of FT-HSDP's ring, in host memory or staged for a device: a
single-threaded loop over non-blocking sockets.

Each member of the ring receives from its left neighbour and sends to its right neighbour. The tensor is transferred in
items: one item is one chunk to send and one chunk to receive (:mod:`ft.systems.hsdp.ring.numbers`). An item can be
sent only after the item that it depends on has been received and added.
"""

import socket
import struct
from collections.abc import Callable

import torch

from ft.base.errors import UserError
from ft.state import device as devices
from ft.systems.hsdp.ring import numbers
from ft.systems.hsdp.ring.links import READ, WRITE, Links, Poller, RingLink
from ft.systems.hsdp.ring.numbers import Item, ReducedTensor, items
from ft.systems.hsdp.ring.options import RingOptions
from ft.systems.hsdp.ring.staging import Staged, Staging

_HEAD = struct.Struct("!8sQQBd")
_MAGIC = b"ftar-op1"


def head(operation: int, elements: int, kind: int, scale: float) -> bytes:
    """Return the encoded header that precedes the data, by which neighbours check that they do the same all-reduce."""
    return _HEAD.pack(_MAGIC, operation, elements, kind, scale)


class Lane:
    """A connection from the left neighbour, the matching one to the right neighbour, and the transfers on both.

    Attributes:
        coming: index of the item that is being received, -1 for the header.
        going: index of the item that is being sent, -1 for the header.
        into: rest of the buffer into which an item is being received; None between items.
        out: rest of the bytes of the item that is being sent; None between items.
        full: whether the connection takes no more bytes at present.
        least: number of bytes from which on the socket reports that it is readable; 0: not set.
    """

    __slots__ = ("coming", "full", "going", "into", "least", "left", "next_in", "next_out", "out", "right")

    def __init__(self, left: socket.socket, right: socket.socket, first: int):
        self.left, self.right = left, right
        self.next_in = self.next_out = first
        self.coming = self.going = -1
        self.into: memoryview | None = None
        self.out: memoryview | None = None
        self.full = False
        self.least = 0

    def wake_when_whole(self) -> None:
        """Let poll report the left connection only when the rest of the item has arrived.

        This saves iterations of the loop and system calls.
        """
        if len(self.into) != self.least:
            self.least = len(self.into)
            self.left.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self.least)


class Flow:
    """The transfer loop of one all-reduce.

    With K data connections to each neighbour there are K lanes; lane k carries items k, k + K, ..., and lane 0 carries
    the header before its items.

    Args:
        pause: waits until a transfer may be possible, or raises Broken; called only when no transfer is possible.
        moved: called after every iteration that has made progress.
    """

    def __init__(self, links: Links, poller: Poller, pause: Callable[[], None], moved: Callable[[], None]):
        self._links, self._poller, self._pause, self._moved = links, poller, pause, moved

    def run(self, head: bytes, items: tuple[Item, ...], numbers: ReducedTensor) -> None:
        """Do one all-reduce.

        Raises:
            Broken: the ring is not usable any more.
            UserError: the left neighbour does another all-reduce: the headers differ.
        """
        self._items, self._numbers, self._total = items, numbers, len(items)
        self._have, self._gone = bytearray(self._total), bytearray(self._total + 1)
        self._received = self._sent = self._sent_in_order = 0
        self._head_out, self._head_in = head, bytearray(_HEAD.size)
        pairs = zip(self._links.left.data, self._links.right.data, strict=True)
        self._lanes = [Lane(left, right, first) for first, (left, right) in enumerate(pairs)]
        self._lanes[0].out, self._lanes[0].into = memoryview(head), memoryview(self._head_in)
        self._left = {lane.left.fileno(): READ for lane in self._lanes}
        self._right = {lane.right.fileno(): 0 for lane in self._lanes}
        for descriptor, events in self._left.items():
            self._poller.watch(descriptor, events, _nothing)
        try:
            self._loop()
        finally:
            for descriptor in (*self._left, *self._right):
                self._poller.forget(descriptor)

    def _loop(self) -> None:
        lanes, links = self._lanes, self._links
        while self._received < self._total or self._sent < self._total or lanes[0].out or lanes[0].into:
            if links.broken:
                raise links.broken
            moved = self._numbers.is_busy and self._add(wait=False)
            for lane in lanes:
                moved |= self._send(lane)
                moved |= self._receive(lane)
            if moved:
                self._moved()
            elif self._numbers.is_busy:
                self._add(wait=True)
            else:
                self._await()

    def _send(self, lane: Lane) -> bool:
        """Send items that are ready until the connection takes no more; return whether any bytes were sent."""
        moved, lane.full = False, False
        while True:
            if lane.out is None and not self._next_out(lane):
                return moved
            try:
                count = lane.right.send(lane.out) if lane.out else 0
            except BlockingIOError:
                lane.full = True
                return moved
            except OSError as error:
                raise self._lost(self._links.right, error) from error
            moved = True
            if count < len(lane.out):
                lane.out, lane.full = lane.out[count:], True
                return moved
            self._went(lane)

    def _next_out(self, lane: Lane) -> bool:
        index = lane.next_out
        if index >= self._total:
            return False
        item = self._items[index]
        if not (self._have[item.needs] if item.needs >= 0 else self._numbers.can_send(index)):
            return False
        lane.out, lane.going, lane.next_out = self._numbers.outgoing(index, item), index, index + len(self._lanes)
        return True

    def _went(self, lane: Lane) -> None:
        lane.out = None
        if lane.going < 0:
            return
        self._numbers.went(lane.going, self._items[lane.going])
        self._gone[lane.going] = 1
        self._sent += 1
        while self._gone[self._sent_in_order]:
            self._sent_in_order += 1

    def _receive(self, lane: Lane) -> bool:
        """Receive the bytes of one item that have arrived; return whether there was progress."""
        if lane.into is None and not self._next_in(lane):
            return False
        if lane.into:
            try:
                count = lane.left.recv_into(lane.into)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._lost(self._links.left, error) from error
            if not count:
                raise self._links.lost(self._links.left, "it closed its connection")
            if count < len(lane.into):
                lane.into = lane.into[count:]
                return True
        self._came(lane)
        return True

    def _next_in(self, lane: Lane) -> bool:
        index = lane.next_in
        if index >= self._total or not self._numbers.has_room(index, self._items[index], self._sent_in_order):
            return False
        place = self._lanes.index(lane) if len(self._lanes) > 1 else 0
        lane.into = self._numbers.incoming(index, self._items[index], place)
        lane.coming, lane.next_in = index, index + len(self._lanes)
        return True

    def _came(self, lane: Lane) -> None:
        lane.into = None
        if lane.coming < 0:
            self._check_head()
            return
        place = self._lanes.index(lane) if len(self._lanes) > 1 else 0
        if self._numbers.take(lane.coming, self._items[lane.coming], place):
            self._have[lane.coming] = 1
            self._received += 1

    def _add(self, wait: bool) -> bool:
        """Note the results that a device has added; return whether there are any."""
        added = self._numbers.added(wait)
        for index in added:
            self._have[index] = 1
        self._received += len(added)
        return bool(added)

    def _check_head(self) -> None:
        if self._head_in == self._head_out:
            return
        own, other = _HEAD.unpack(self._head_out), _HEAD.unpack(self._head_in)
        raise UserError(
            f"the left neighbour, member {self._links.left.index}, reduces {_in_words(other)}, "
            f"this member {_in_words(own)}",
            "all members must reduce the same tensors in the same order",
        )

    def _await(self) -> None:
        for lane in self._lanes:
            if lane.into:
                lane.wake_when_whole()
            self._want(self._left, lane.left.fileno(), READ if lane.into else 0)
            self._want(self._right, lane.right.fileno(), WRITE if lane.full else 0)
        self._pause()

    def _want(self, wanted: dict[int, int], descriptor: int, events: int) -> None:
        """Poll a descriptor for ``events`` from now on.

        If ``events`` is 0, the descriptor is removed from the poller, because poll would report a hang-up again and
        again.
        """
        if wanted[descriptor] == events:
            return
        if not events:
            self._poller.forget(descriptor)
        else:
            self._poller.watch(descriptor, events, _nothing)
        wanted[descriptor] = events

    def _lost(self, link: RingLink, error: OSError) -> Exception:
        return self._links.lost(link, error.strerror or str(error))


def _in_words(fields: tuple) -> str:
    _, operation, elements, kind, scale = fields
    return f"{elements} elements of type {kind} times {scale:g} as operation {operation}"


def _nothing() -> None:
    pass


class Reducer:
    """Reduces the tensors of a ring, one after another, on the ring's thread."""

    def __init__(
        self, poller: Poller, options: RingOptions, pause: Callable[[], None], moved: Callable[[], None]
    ) -> None:
        self._poller, self._options, self._pause, self._moved = poller, options, pause, moved
        self._buffers = numbers.Buffers(options.chunk_bytes // 4, options.chunks, options.streams)
        self._stagings: dict[torch.device, Staging] = {}

    def await_ready(self, tensor: torch.Tensor, after: Callable[[], None] | None, look: Callable[[], None]) -> None:
        """Wait until ``tensor`` may be read.

        Args:
            after: see :meth:`ft.systems.hsdp.ring.ring.Ring.all_reduce`; not None for a tensor on a device.
            look: called again and again while a device has work to do before; it returns soon, or raises.
        """
        if tensor.device.type == "cpu":
            if after is not None:
                after()
            return
        staging = self._staging(tensor.device)
        with staging.on_stream():
            after()
        ready = staging.mark()
        while not ready.query():
            look()

    def reduce(self, tensor: torch.Tensor, scale: float, links: Links, me: int, members: int) -> None:
        """Replace ``tensor`` by the sum over all members times ``scale``.

        Raises:
            Broken: the ring is not usable any more.
            UserError: the left neighbour does another all-reduce.
        """
        options = self._options
        plan = items(tensor.numel(), members, me, options.chunk_bytes // 4, options.chunks)
        begin = head(links.operation, tensor.numel(), numbers.TYPES[tensor.dtype], scale)
        if tensor.device.type == "cpu":
            chunks = numbers.of(tensor, scale, members, self._buffers)
        else:
            chunks = Staged(tensor, scale, members, self._staging(tensor.device), plan)
        Flow(links, self._poller, self._pause, self._moved).run(begin, plan, chunks)
        while chunks.is_busy:
            chunks.added(wait=True)

    def scale_alone(self, tensor: torch.Tensor, scale: float) -> None:
        """Multiply ``tensor`` by ``scale``: the all-reduce of a ring with one member."""
        if scale == 1:
            return
        if tensor.device.type == "cpu":
            tensor.detach().mul_(scale)
            return
        staging = self._staging(tensor.device)
        with staging.on_stream():
            tensor.detach().mul_(scale)
        staging.mark().synchronize()

    def settle(self, tensor: torch.Tensor, is_over: Callable[[], bool]) -> None:
        """After a failure, wait until no work of this ring on the device of ``tensor`` can touch it any more.

        Args:
            is_over: called again and again meanwhile; returns soon, and whether the wait is to be given up.
        """
        staging = self._stagings.get(tensor.device)
        if staging is None:
            return
        settled = staging.mark()
        while not settled.query() and not is_over():
            pass

    def _staging(self, device: torch.device) -> Staging:
        """Return the staging buffers of a device; they are created with its first tensor."""
        if device not in self._stagings:
            self._stagings[device] = Staging(device, self._options)
        devices.enter(device)
        return self._stagings[device]
