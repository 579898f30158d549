"""Waits for a work in such a way that the wait can be abandoned although the work never ends.

When a connection breaks, gloo does not wake two kinds of waiters: the sender of a message of which a part is queued,
and the receiver of a message of which a part has arrived. They wait until gloo's timeout. So no thread of the program
blocks in gloo itself:

- a collective runs in one of gloo's threads, and is waited for in short slices of time;
- for a message, a helper thread waits in gloo, and the caller waits for the helper thread; so it is for a
  reduce-scatter, whose work ignores the timeout of a wait.

An abandoned waiter touches no buffer any more: the connections that it would read or write are closed.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ft.state.groups.state import EpochState

_SLICE = timedelta(milliseconds=20)
# Seconds after the end of the epoch in which an operation may still end by itself, as nearly all do within 5 ms.
GRACE_S = 0.02
_LOOK_S = 0.001


class LeftBehind(RuntimeError):
    """The epoch was closed, and the work did not end."""


def wait_for_collective(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """Wait as ``work.wait(timeout)`` does, for a collective of gloo's.

    Raises:
        LeftBehind: the epoch was closed and the work goes on.
        RuntimeError: the work failed or timed out.
    """
    deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                return work.wait()  # it has failed, or has ended just after the slice
            if deadline is not None and time.monotonic() > deadline:
                raise
        if state.closed is not None and not ends_soon(work.is_completed):
            raise LeftBehind


def ends_soon(is_over: Callable[[], bool]) -> bool:
    """Return whether ``is_over`` becomes true within ``GRACE_S`` seconds."""
    deadline = time.monotonic() + GRACE_S
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class _Waiter:
    """A thread that waits for one work after the other.

    Two plain locks hand over the work and the result, because this is on the path of every message.
    """

    def __init__(self):
        self._task: tuple[dist.Work, timedelta | None, list] | None = None
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        threading.Thread(target=self._run, name="ft-wait", daemon=True).start()

    def wait(self, work: dist.Work, timeout: timedelta | None, state: EpochState) -> list:
        """Return the result or the exception as a list's only item, an empty list if the epoch was closed first."""
        outcome: list[bool | Exception] = []
        self._task = (work, timeout, outcome)
        state.wake.add(self._wake)  # registered before the flag is read; ``close`` does the reverse
        self._asked.release()
        if state.closed is None:
            self._answered.acquire()
        state.wake.discard(self._wake)
        return outcome

    def retire(self) -> None:
        """Make the thread end as soon as its last wait does."""
        self._asked.release()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the result and the end of the epoch may both come
            self._answered.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            if self._task is None:
                return
            work, timeout, outcome = self._task
            self._task = None
            try:
                outcome.append(work.wait() if timeout is None else work.wait(timeout))
            except Exception as error:
                outcome.append(error)
            del work  # it refers to its connection
            self._wake()


_idle: list[_Waiter] = []


def wait_for_message(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """Wait as ``work.wait(timeout)`` does, for a work of gloo's that cannot be waited for in slices.

    Raises:
        LeftBehind: the epoch was closed and the work goes on.
        RuntimeError: the work failed or timed out.
    """
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _Waiter()
    outcome = waiter.wait(work, timeout, state)
    if state.closed is None:
        _idle.append(waiter)
    else:
        answered = outcome or ends_soon(lambda: bool(outcome))
        waiter.retire()  # its result and the end of the epoch may have come at the same time
        if not answered:
            raise LeftBehind
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
