"""poll(2) with callbacks: one thread waits, any other can wake it."""

import contextlib
import os
import select
from collections.abc import Callable

READ, WRITE = select.POLLIN, select.POLLOUT


class Poller:
    """What the driver waits with."""

    def __init__(self):
        self._poll = select.poll()
        self._calls: dict[int, Callable[[], None]] = {}
        self._waker, self._alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._waker, READ)

    def watch(self, descriptor: int, events: int, call: Callable[[], None]) -> None:
        """``call`` is called in :meth:`wait` when one of ``events``, or an error, is there."""
        self._poll.register(descriptor, events)
        self._calls[descriptor] = call

    def change(self, descriptor: int, events: int) -> None:
        self._poll.modify(descriptor, events)

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def wait(self, limit_s: float | None) -> None:
        """Waits until something happens, at most ``limit_s``, and makes the calls for it."""
        for descriptor, _ in self._poll.poll(None if limit_s is None else max(0.0, limit_s * 1e3)):
            if descriptor == self._waker:
                os.read(self._waker, 4096)
            elif call := self._calls.get(descriptor):  # an earlier call may have forgotten it
                call()

    def wake(self) -> None:
        """Ends a :meth:`wait`, the present or the next one; from any thread."""
        with contextlib.suppress(BlockingIOError):  # full of wakes
            os.write(self._alarm, b"w")

    def close(self) -> None:
        os.close(self._waker)
        os.close(self._alarm)
