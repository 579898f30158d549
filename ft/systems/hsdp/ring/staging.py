"""FT-HSDP's ring all-reduce of tensors on a GPU: chunks are staged in pinned host memory, because the ring's sockets
read and write host memory only.

Copies and additions are queued on a separate CUDA stream, and run while the ring's thread sends and receives other
chunks. Each has an event, and the host touches the memory of a piece of work only after its event. The tensor itself
is read once and written once per chunk.

Every rank has three rings of pinned buffers. ``first`` has the chunks that are sent unchanged (step 0), copied from the
device ahead of time. ``received`` has what the left neighbour has sent; a finished chunk (all-gather) is sent on from
there. ``waiting`` has sums that wait to be sent on (reduce-scatter).
"""

import contextlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ft.state import device as devices
from ft.systems.hsdp.ring.numbers import Item, ReducedTensor
from ft.systems.hsdp.ring.options import RingOptions

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
    """Return the fused kernel if Triton is installed and can compile it here, else :func:`add_in_passes`."""
    if importlib.util.find_spec("triton") is None:
        return add_in_passes
    try:
        from ft.systems.hsdp.ring.fused import add

        some = torch.zeros(16, device=device)
        add(some, some, 1.0, some, None)
    except Exception as error:  # Triton passes on any exception of its compiler and of the C compiler
        print(f"ft: sums of the ring take several passes, slower: Triton gave {error}", file=sys.stderr)
        return add_in_passes
    return add


def when_queued(device: torch.device) -> Callable[[], None]:
    """Record an event on the calling thread's current stream. Return a function that makes the current stream of the
    thread that calls it wait for this event.
    """
    queued = torch.cuda.Event()
    queued.record(torch.cuda.current_stream(device))
    return lambda: torch.cuda.current_stream(device).wait_event(queued)


class Staging:
    """CUDA stream and pinned buffers of a ring for the tensors on one CUDA device.

    The calling thread's current device becomes ``device``.

    Attributes:
        slots: number of buffers in ``received`` and in ``waiting``.
        add: function that adds a received chunk.
    """

    def __init__(self, device: torch.device, options: RingOptions):
        devices.enter(device)
        self.device, self.stream, self.add = device, devices.side_stream(device), best_add(device)
        self.slots = 2 * options.chunks
        self.first, self.received, self.waiting = (
            torch.zeros(rows, options.chunk_bytes // 4, pin_memory=True)
            for rows in (max(options.streams, options.chunks), self.slots, self.slots)
        )

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Return a context in which work is queued on the stream."""
        with torch.cuda.stream(self.stream), torch.no_grad():
            yield

    def mark(self) -> torch.cuda.Event:
        """Record an event behind all that is queued on the stream; waiting for it does not keep a processor busy."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event


@dataclass
class _Queued:
    """A piece of work on the device: the event behind it, and its item; ``kind`` is FETCHED, ADDED or STORED."""

    event: torch.cuda.Event
    kind: str
    index: int


FETCHED, ADDED, STORED = "fetched", "added", "stored"


class Staged(ReducedTensor):
    """One tensor on a device during its all-reduce. Results have the same bits as those of a tensor in host memory.

    Args:
        tensor: the tensor; the staging's stream has to wait already for the work that produces it.
    """

    def __init__(self, tensor: torch.Tensor, scale: float, members: int, staging: Staging, plan: Sequence[Item]):
        self._elements, self._staging, self._slots = tensor.detach().view(-1), staging, staging.slots
        self._scale, self._last = scale, members - 2
        self._own = tensor.dtype
        self._queued: deque[_Queued] = deque()
        self._done = bytearray(len(plan))  # items that were received, and whose chunk the device has read
        self._at_first = [(index, item) for index, item in enumerate(plan) if not item.step]
        self._free, self._rows = list(range(len(staging.first))), {}  # buffers in ``first``; item -> its buffer
        self._fetching, self._fetched = 0, set()
        while self._free and self._fetching < len(self._at_first):
            self._fetch_next()

    @property
    def is_busy(self) -> bool:
        return bool(self._queued)

    def can_send(self, index: int) -> bool:
        return index in self._fetched

    def outgoing(self, index: int, item: Item) -> memoryview:
        first, behind = item.send
        size, dtype = behind - first, self._type(item.step)
        if not item.step:
            return _bytes(self._first(index, size))
        kept = self._staging.waiting if item.step <= self._last + 1 else self._staging.received
        return _bytes(staged(kept[item.needs % self._slots], size, dtype))

    def went(self, index: int, item: Item) -> None:
        if not item.step:
            self._fetched.discard(index)
            self._free.append(self._rows.pop(index))
            if self._fetching < len(self._at_first):
                self._fetch_next()

    def incoming(self, index: int, item: Item, stream: int) -> memoryview:
        return _bytes(self._came(index, item))

    def has_room(self, index: int, item: Item, sent: int) -> bool:
        # Item index - 2C has the same buffers. What it has received or added is sent on as one of the C items after it,
        # if at all. With several connections, this item may be here before that one.
        before = index - self._slots
        return before < 0 or (self._done[before] and sent > index - self._slots // 2)

    def take(self, index: int, item: Item, stream: int) -> bool:
        first, behind = item.receive
        own, got = self._elements[first:behind], self._came(index, item)
        sums = staged(self._staging.waiting[index % self._slots], behind - first, self._type(item.step + 1))
        with self._staging.on_stream():
            if item.step < self._last:
                self._staging.add(got, own, 1.0, sums, None)
            elif item.step == self._last:
                self._staging.add(got, own, self._scale, own, sums)
            else:
                own.copy_(got, non_blocking=True)
        is_final = item.step > self._last
        self._queued.append(_Queued(self._staging.mark(), STORED if is_final else ADDED, index))
        return is_final  # a final chunk is sent on from where it was received, while the device reads it

    def added(self, wait: bool) -> Sequence[int]:
        if wait:
            self._queued[0].event.synchronize()
        found = []
        while self._queued and (wait or self._queued[0].event.query()):
            wait, done = False, self._queued.popleft()
            if done.kind == FETCHED:
                self._fetched.add(done.index)
                continue
            self._done[done.index] = 1
            if done.kind == ADDED:
                found.append(done.index)
        return found

    def _fetch_next(self) -> None:
        """Begin to copy the next chunk that is sent unchanged into a free buffer."""
        index, item = self._at_first[self._fetching]
        self._fetching += 1
        self._rows[index] = self._free.pop()
        first, behind = item.send
        with self._staging.on_stream():
            self._first(index, behind - first).copy_(self._elements[first:behind], non_blocking=True)
        self._queued.append(_Queued(self._staging.mark(), FETCHED, index))

    def _type(self, step: int) -> torch.dtype:
        """Return the type of elements on the wire in ``step``."""
        return torch.float32 if 0 < step <= self._last else self._own

    def _first(self, index: int, size: int) -> torch.Tensor:
        return staged(self._staging.first[self._rows[index]], size, self._own)

    def _came(self, index: int, item: Item) -> torch.Tensor:
        first, behind = item.receive
        return staged(self._staging.received[index % self._slots], behind - first, self._type(item.step))


def staged(room: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first ``size`` elements of ``dtype`` in a buffer."""
    return room.view(dtype)[:size]


def _bytes(chunk: torch.Tensor) -> memoryview:
    return memoryview(chunk.view(torch.uint8).numpy())
