"""State that all process groups of a worker share: the epoch, whether it is open, and how failures are reported."""

import threading
import time
from collections.abc import Callable
from typing import Any

from ft.base.errors import EpochClosed, RecoverableError
from ft.base.step_clock import CLOCK
from ft.state.groups.history import History

OnFailure = Callable[[str, BaseException], None]


class _Thread(threading.local):
    """What a thread does in this process, found out once for each thread.

    Args:
        trainer: identifier of the training thread.

    Attributes:
        trains: whether the operations of the thread belong to training: those of the training thread, and those of
            threads that Python has not started. Such are autograd's, which run the backward pass of a model on a GPU
            while the training thread waits for them. The waits of all other threads do not show whether training makes
            progress.
        name: name of the thread.
    """

    def __init__(self, trainer: int):
        thread = threading.current_thread()
        foreign = isinstance(thread, threading._DummyThread)
        self.trains, self.name = foreign or threading.get_ident() == trainer, thread.name


class EpochState:
    """The shared state. The recovery and ``Groups.close`` write it, and every operation reads it.

    Attributes:
        epoch: the epoch that operations belong to.
        closed: (number, reason) of the epoch that was closed, ``epoch`` or a later one; None while the epoch is open.
            Operations in a closed epoch raise an exception.
        alone: whether this worker joins a running job and its groups have no connections yet. Operations then complete
            locally, even in a closed epoch.
        wake: functions to call after ``closed`` was set, so that waiting threads return.
        waiting: (name of a group, monotonic time) while training is blocked in an operation, otherwise None.
        awaited: the work of that operation; None while training is not blocked, or connects a group.
        besides: name of another thread -> the work in whose wait it is blocked.
        history: the operations that training has started last.
        thread: its attribute ``trains`` tells whether the calling thread's operations belong to training.
        before_drop: functions to call before connections are dropped; each returns when its thread is in no operation.
            In a closed epoch no operation begins, and those under way end soon.
    """

    def __init__(self, epoch: int, alone: bool, on_failure: OnFailure):
        self.epoch, self.alone = epoch, alone
        self.closed: tuple[int, str] | None = None
        self.wake: set[Callable[[], None]] = set()
        self.before_drop: list[Callable[[], None]] = []
        self.waiting: tuple[str, float] | None = None
        self.awaited: Any = None
        self.besides: dict[str, Any] = {}
        self.history = History()
        self._on_failure, self.thread = on_failure, _Thread(threading.get_ident())

    def begins_to_wait(self, group: str, work: Any = None) -> None:
        if self.thread.trains:
            self.waiting, self.awaited = (group, time.monotonic()), work
            CLOCK.begins_to_wait(group)
        elif work is not None:
            self.besides[self.thread.name] = work

    def has_waited(self) -> None:
        if self.thread.trains:
            self.waiting = self.awaited = None
            CLOCK.has_waited()
        else:
            self.besides.pop(self.thread.name, None)

    def settle(self) -> None:
        """Wait until no thread of ``before_drop`` is in an operation. Call it in a closed epoch."""
        for is_idle in self.before_drop:
            is_idle()

    def error_of(self, group: str, ranks: list[int], error: BaseException) -> Exception:
        """Return the exception for an operation that failed with ``error``.

        If the epoch is open, first report the failure and wait for the control plane to close the epoch. ``ranks`` are
        the logical ranks of the group's members.
        """
        if self.closed is None:
            self._on_failure(group, error)
        if self.closed is not None:
            return EpochClosed(*self.closed)
        return RecoverableError(f"group {group} of logical ranks {ranks} failed: {str(error).strip()}")
