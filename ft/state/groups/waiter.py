"""Waits for a gloo operation (``dist.Work``) such that the wait can be abandoned although the operation never ends.

When a connection breaks, gloo leaves two kinds of threads blocked until its timeout: the sender of a message that is
partly queued, and the receiver of a message that has partly arrived. So no thread of the program blocks in gloo itself:

- a collective runs in one of gloo's threads; the caller waits for it in short slices of time;
- for a message, a helper thread waits in gloo, and the caller waits for the helper thread; a reduce-scatter is handled
  in the same way, because its work ignores the timeout of a wait.

A wait is abandoned when the epoch (a version of the assignment of workers to ranks) is closed because of a failure. An
abandoned operation does not access its buffers any more, because its connections are closed.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ft.state.groups.state import EpochState

_SLICE = timedelta(milliseconds=20)
# Seconds after the end of the epoch in which an operation may still end by itself; nearly all end within 5 ms.
GRACE_S = 0.02
_LOOK_S = 0.001


class LeftBehind(RuntimeError):
    """The epoch was closed, and the work did not end."""


def wait_for_collective(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """Wait for a gloo collective, as ``work.wait(timeout)`` does: without a limit if ``timeout`` is zero or None.

    torch's own callers in C++, such as functional collectives, pass zero (``kNoTimeout``).

    Raises:
        LeftBehind: the epoch was closed, and the work has not ended.
        RuntimeError: the work failed or timed out.
    """
    deadline = time.monotonic() + timeout.total_seconds() if timeout else None
    while True:
        try:
            return work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                return work.wait()  # the work has failed, or has ended just after the slice
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
    """A helper thread that waits for one work after another.

    The work and the result are handed over with two plain locks, which are fast: every message passes through here.
    """

    def __init__(self):
        self._task: tuple[dist.Work, timedelta | None, list] | None = None
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        threading.Thread(target=self._run, name="ft-wait", daemon=True).start()

    def wait(self, work: dist.Work, timeout: timedelta | None, state: EpochState) -> list:
        """Wait for ``work``. Return [its result or its exception], or [] if the epoch was closed first."""
        outcome: list[bool | Exception] = []
        self._task = (work, timeout, outcome)
        # The order matters: register, then read the flag. ``close`` sets the flag and then calls what is registered.
        state.wake.add(self._wake)
        self._asked.release()
        if state.closed is None:
            self._answered.acquire()
        state.wake.discard(self._wake)
        return outcome

    def retire(self) -> None:
        """Make the thread end as soon as its present wait has ended."""
        self._asked.release()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # both the result and the end of the epoch may release the lock
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
            del work, outcome  # the work holds its connection, and an exception in the outcome this frame
            self._wake()


_idle: list[_Waiter] = []


def wait_for_message(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """Wait for a gloo work whose wait cannot be divided into slices, as ``work.wait(timeout)`` does.

    Raises:
        LeftBehind: the epoch was closed, and the work has not ended.
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
        waiter.retire()  # not reused: its result and the end of the epoch may have released its lock twice
        if not answered:
            raise LeftBehind
    result = outcome.pop()
    if isinstance(result, Exception):
        try:
            raise result
        finally:
            del result  # the exception holds this frame, and frames below it the work with its connection
    return result
