"""The two neighbours of a member of FT-HSDP's ring, in the member's own thread, for tests on the model of CUDA.

The sockets take and give as many bytes at a time as a seed draws, and tell the model of the accesses to host memory.
What the left neighbour sends is computed from the values of all members, and is there as soon as it can be: a result of
which this member's values are a part, when this member has sent them.
"""

import torch
from cuda_model import Cuda

from ft.systems.hsdp.ring import RingOptions, numbers
from ft.systems.hsdp.ring.flow import head
from ft.systems.hsdp.ring.numbers import items
from ft.systems.hsdp.ring.options import Broken


class Neighbours:
    """Stands for the links to both neighbours (``ft.systems.hsdp.ring.links.Links``) in one all-reduce.

    Args:
        cuda: the model, whose generator draws the sizes.
        values: the tensors of all members, of whole numbers, so that every order of additions gives the same sum.
        me: index of the member under test.
        options: options of the ring.
        scale: factor by which the sum is multiplied.

    Attributes:
        sent: items that this member has sent.
        breaks_after: the connection is lost when this item comes; None: it is not lost.
    """

    def __init__(self, cuda: Cuda, values: list[torch.Tensor], me: int, options: RingOptions, scale: float):
        self.cuda, self._values, self._me, self._scale = cuda, values, me, scale
        self._members = len(values)
        size, chunk = values[0].numel(), options.chunk_bytes // 4
        self.plan = items(size, self._members, me, chunk, options.chunks)
        self.operation, self.broken, self.busy = 1, None, True
        begin = head(1, size, numbers.TYPES[values[0].dtype], scale)
        lanes = range(options.streams)
        self.left, self.right = _Side(), _Side()
        self.left.data = [_Left(self, lane, options.streams, begin if lane == 0 else b"") for lane in lanes]
        self.right.data = [_Right(self, lane, options.streams, len(begin) if lane == 0 else 0) for lane in lanes]
        self.sent: set[int] = set()
        self.breaks_after: int | None = None

    def result(self) -> torch.Tensor:
        """Return the sum of all members, scaled."""
        total = sum(each.float() for each in self._values)
        return (total * self._scale).to(self._values[0].dtype)

    def received(self, index: int) -> bytes | None:
        """Return the bytes of item ``index`` from the left neighbour; None: they are not there yet."""
        if index >= len(self.plan):
            return None
        if self.breaks_after is not None and index >= self.breaks_after:
            raise Broken("the connection is lost", 1)
        item = self.plan[index]
        if item.step >= self._members - 1 and self._origin(index) not in self.sent:
            return None
        return self._bytes(item.receive, item.step, (self._me - item.step - 1) % self._members)

    def expected(self, index: int) -> bytes:
        """Return the bytes of item ``index`` that this member has to send."""
        item = self.plan[index]
        return self._bytes(item.send, item.step, (self._me - item.step) % self._members)

    def _bytes(self, span: tuple[int, int], step: int, part: int) -> bytes:
        first, behind = span
        own = self._values[0].dtype
        if step > self._members - 2:
            chunk = self.result()[first:behind]
        else:
            among = [self._values[(part + at) % self._members][first:behind].float() for at in range(step + 1)]
            chunk = sum(among).to(torch.float32 if step else own)
        return chunk.contiguous().view(torch.uint8).numpy().tobytes()

    def _origin(self, index: int) -> int:
        """Return the item with which this member has sent its part of the result that it receives as ``index``."""
        item = self.plan[index]
        wanted = item.step - (self._members - 1)
        for back in range(index, -1, -1):
            if self.plan[back].step == wanted and self.plan[back].send == item.receive:
                return back
        raise AssertionError(f"no item before {index} has sent {item.receive}")


class Poller:
    """Stands for the poller of the ring's thread: waiting lets the device and the neighbours go on."""

    def __init__(self, cuda: Cuda):
        self._cuda = cuda

    def watch(self, *_: object) -> None:
        """Do nothing: the sockets are always polled."""

    def forget(self, *_: object) -> None:
        """Do nothing: the sockets are always polled."""

    def wait(self, *_: object) -> None:
        self._cuda.breathe()


class _Side:
    """A neighbour: ``data`` has its sockets."""

    data: list
    index = 0


class _Socket:
    def __init__(self, ring: Neighbours, lane: int, lanes: int):
        self._ring, self._next, self._lanes = ring, lane, lanes

    def fileno(self) -> int:
        return id(self)

    def setsockopt(self, *_: object) -> None:
        """Do nothing: no socket of the system is behind this one."""

    def _skip_empty(self, side: str) -> None:
        """Go on to the next item of this connection that has bytes: the ring sends nothing for the others."""
        plan = self._ring.plan
        while self._next < len(plan) and len(range(*getattr(plan[self._next], side))) == 0:
            self._next += self._lanes

    def _some(self, most: int) -> int:
        draw = self._ring.cuda.random
        count = draw.choice((most, most, draw.randint(0, most)))
        if not count:
            raise BlockingIOError
        return count


class _Left(_Socket):
    def __init__(self, ring: Neighbours, lane: int, lanes: int, begin: bytes):
        super().__init__(ring, lane, lanes)
        self._rest = begin

    def recv_into(self, room: memoryview) -> int:
        ring = self._ring
        if not self._rest:
            self._skip_empty("receive")
            found = ring.received(self._next)
            if found is None:
                raise BlockingIOError
            self._rest, self._next = found, self._next + self._lanes
        count = self._some(min(len(room), len(self._rest)))
        ring.cuda.writes_on_host(room[:count], "the network")
        room[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class _Right(_Socket):
    def __init__(self, ring: Neighbours, lane: int, lanes: int, head_bytes: int):
        super().__init__(ring, lane, lanes)
        self._head, self._got = head_bytes, b""

    def send(self, data: memoryview) -> int:
        ring, count = self._ring, self._some(len(data))
        ring.cuda.reads_on_host(data[:count], "the network")
        taken = bytes(data[:count])
        if self._head:
            count = min(count, self._head)
            self._head -= count
            return count
        self._skip_empty("send")
        self._got += taken
        wanted = ring.expected(self._next)
        assert wanted.startswith(self._got), f"item {self._next} is sent with wrong bytes"
        if self._got == wanted:
            ring.sent.add(self._next)
            self._got, self._next = b"", self._next + self._lanes
        return count


def whole_numbers(generator: torch.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of small whole numbers, whose sums are exact in every type."""
    return torch.randint(-8, 9, (size,), generator=generator).to(dtype)
