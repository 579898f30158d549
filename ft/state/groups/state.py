"""What all groups of a worker share: the epoch, whether it is open, and what an operation that failed raises."""

import threading
import time
from collections.abc import Callable

from ft.base.errors import EpochClosed, RecoverableError

OnFailure = Callable[[str, BaseException], None]


class EpochState:
    """Written by the recovery and by ``Groups.close``; every operation reads it.

    Attributes:
        epoch: the epoch that operations belong to.
        closed: (epoch, reason) once that epoch, or one after it, is over; operations raise then.
        alone: this worker assembles while its groups have no connections; operations end here, and always can.
        wake: to be called when ``closed`` has been set: threads that wait for something else leave then.
        waiting: (name of a group, monotonic time) while the training thread, which has made this, is blocked in an
            operation. What other threads wait for says nothing of whether training gets on.
    """

    def __init__(self, epoch: int, alone: bool, on_failure: OnFailure):
        self.epoch, self.alone = epoch, alone
        self.closed: tuple[int, str] | None = None
        self.wake: set[Callable[[], None]] = set()
        self.waiting: tuple[str, float] | None = None
        self._on_failure, self._trainer = on_failure, threading.get_ident()

    def begins_to_wait(self, group: str) -> None:
        if threading.get_ident() == self._trainer:
            self.waiting = (group, time.monotonic())

    def has_waited(self) -> None:
        if threading.get_ident() == self._trainer:
            self.waiting = None

    def error_of(self, group: str, ranks: list[int], error: BaseException) -> Exception:
        """The exception for an operation that failed with ``error``; asks for a verdict first if the epoch is open."""
        if self.closed is None:
            self._on_failure(group, error)
        if self.closed is not None:
            return EpochClosed(*self.closed)
        return RecoverableError(f"group {group} of logical ranks {ranks} failed: {str(error).strip()}")
