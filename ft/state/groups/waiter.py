"""Waiting for a work in such a way that the wait can be left although the work never ends.

gloo forgets two kinds of waiters when a connection breaks: whoever sends a message of which a part is queued, and
whoever receives one of which a part has come. They wait on until gloo's timeout. So nobody of us blocks in gloo itself:

- a collective operation runs in a thread of gloo's; one waits for it a slice at a time;
- a message is waited for in gloo by a thread of ours, and for that thread by whoever wants the message; the same goes
  for a reduce-scatter, whose work takes no heed of the time it is to wait.

Who is left behind touches no buffer any more: the connections it would read or write are closed.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ft.state.groups.state import EpochState

_SLICE = timedelta(milliseconds=20)
# From the end of the epoch on, for as long is an operation given to end by itself, as nearly all do within 5 ms.
GRACE_S = 0.02
_LOOK_S = 0.001


class LeftBehind(RuntimeError):
    """The epoch was closed, and the work did not end."""


def wait_for_collective(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """As ``work.wait(timeout)``; for a collective operation of gloo's.

    Raises:
        LeftBehind: the epoch was closed and it goes on.
        RuntimeError: it failed, or has not ended in time.
    """
    deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return work.wait(_SLICE)
        except RuntimeError:
            if work.is_completed():
                return work.wait()  # it has failed, or has ended just after the slice had
            if deadline is not None and time.monotonic() > deadline:
                raise
        if state.closed is not None and not ends_soon(work.is_completed):
            raise LeftBehind


def ends_soon(is_over: Callable[[], bool]) -> bool:
    """Whether that becomes true within the grace."""
    deadline = time.monotonic() + GRACE_S
    while not is_over():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


class _Waiter:
    """A thread that waits for one work after the other. Two bare locks hand the work over and the answer back: this is
    in the way of every message."""

    def __init__(self):
        self._task: tuple[dist.Work, timedelta | None, list] | None = None
        self._asked, self._answered = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        threading.Thread(target=self._run, name="ft-wait", daemon=True).start()

    def wait(self, work: dist.Work, timeout: timedelta | None, state: EpochState) -> list:
        """The answer or the exception, as the only item; nothing if the epoch was closed first."""
        outcome: list[bool | Exception] = []
        self._task = (work, timeout, outcome)
        state.wake.add(self._wake)  # and then the flag is looked at: ``close`` does it the other way round
        self._asked.release()
        if state.closed is None:
            self._answered.acquire()
        state.wake.discard(self._wake)
        return outcome

    def retire(self) -> None:
        """The thread ends as soon as its last wait does."""
        self._asked.release()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the answer and the end of the epoch may both come
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
            del work  # it holds its connection
            self._wake()


_idle: list[_Waiter] = []


def wait_for_message(work: dist.Work, timeout: timedelta | None, state: EpochState) -> bool:
    """As ``work.wait(timeout)``; for a work of gloo's that cannot be waited for in slices.

    Raises:
        As ``wait_for_collective``.
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
        waiter.retire()  # its answer and the end of the epoch may have crossed
        if not answered:
            raise LeftBehind
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
