"""Event loop of FT-HSDP's all-reduce ring: poll(2) with callbacks. One thread waits; any other thread can wake it."""

import contextlib
import os
import select
from collections.abc import Callable

READ, WRITE = select.POLLIN, select.POLLOUT


class Poller:
    """The file descriptors for whose events the ring's thread waits, each with a callback."""

    def __init__(self):
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._waker, self._alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._waker, READ)

    def watch(self, descriptor: int, events: int, call: Callable[[], None]) -> None:
        """Have :meth:`wait` call ``call`` when one of ``events``, or an error, occurs."""
        self._poll.register(descriptor, events)
        self._calls[descriptor] = call

    def change(self, descriptor: int, events: int) -> None:
        self._poll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wait(self, limit_s: float | None) -> None:
        """Wait for events, for ``limit_s`` seconds at most (None: no limit), and call their callbacks."""
        for descriptor, _ in self._poll.poll(None if limit_s is None else max(0.0, limit_s * 1e3)):
            if descriptor == self._waker:
                os.read(self._waker, 4096)
            elif call := self._calls.get(descriptor):  # an earlier call may have removed it
                call()

    def wake(self) -> None:
        """End the present :meth:`wait`, or the next one. Thread-safe."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so the thread will wake
            os.write(self._alarm, b"w")

    def close(self) -> None:
        os.close(self._waker)
        os.close(self._alarm)
