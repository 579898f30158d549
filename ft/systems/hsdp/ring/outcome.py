"""Result of an all-reduce in FT-HSDP's ring, and the handle (future) of an all-reduce that is not over yet."""

import threading
from dataclasses import dataclass

from ft.base.errors import RecoverableError


@dataclass(frozen=True)
class Outcome:
    """Result of an all-reduce.

    Attributes:
        ok: whether the tensor holds the result. If False, its content is undefined, and the training step has to be
            repeated.
        reason: why the all-reduce failed, in words; "" if it succeeded.
        suspect: index of the ring member that seems to be the cause, None if unknown.
        skipped: whether the all-reduce was never begun.
    """

    ok: bool
    reason: str = ""
    suspect: int | None = None
    skipped: bool = False


class Broken(RecoverableError):
    """The connections of the ring are not usable any more; it has to be reconfigured for the next quorum of replicas.

    Args:
        reason: why, in words.
        suspect: index of the ring member that seems to be the cause, None if unknown.
    """

    def __init__(self, reason: str, suspect: int | None = None):
        self.reason, self.suspect = reason, suspect
        super().__init__(reason)


class Pending:
    """Handle of an all-reduce that was submitted to the ring's thread."""

    def __init__(self):
        self._over = threading.Event()
        self._outcome: Outcome | BaseException | None = None

    def wait(self) -> Outcome:
        """Wait until the all-reduce is over, and return its result.

        The time limit of the ring (``Ring.expect``) ensures that it ends.

        Raises:
            UserError: the members do not reduce the same tensors in the same order.
            BaseException: this process is at fault and a retry is useless; exceptions of the ``after`` function that
                was given to ``Ring.all_reduce`` are passed on.
        """
        self._over.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, outcome: Outcome | BaseException) -> None:
        """Set the result; called on the ring's thread. Only the first call has an effect."""
        if not self._over.is_set():
            self._outcome = outcome
            self._over.set()
