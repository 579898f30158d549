"""Result of an all-reduce, and the handle (future) of one that is not over yet."""

import threading
from dataclasses import dataclass

from ft.base.errors import RecoverableError


@dataclass(frozen=True)
class Outcome:
    """Result of an operation.

    Attributes:
        ok: the tensor holds the result. If False, its content is undefined, and the step is to be tried again.
        reason: why it failed, in words.
        suspect: index of the member that seems to be the cause, None if unknown.
        skipped: the operation was never begun.
    """

    ok: bool
    reason: str = ""
    suspect: int | None = None
    skipped: bool = False


class Broken(RecoverableError):
    """The ring of this quorum is not usable any more; another quorum is needed.

    Args:
        reason: why, in words.
        suspect: index of the member that seems to be the cause, None if unknown.
    """

    def __init__(self, reason: str, suspect: int | None = None):
        self.reason, self.suspect = reason, suspect
        super().__init__(reason)


class Pending:
    """Handle of an operation that was submitted."""

    def __init__(self):
        self._over = threading.Event()
        self._outcome: Outcome | BaseException | None = None

    def wait(self) -> Outcome:
        """Wait until the operation is over, which its time limit (:meth:`Ring.expect`) ensures.

        Raises:
            UserError: the arguments are not valid.
            BaseException: any other exception means that this process is at fault and a retry is useless; exceptions of
                the caller's own ``after`` are passed on.
        """
        self._over.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, outcome: Outcome | BaseException) -> None:
        """Set the result; used by the driver. Only the first call has an effect."""
        if not self._over.is_set():
            self._outcome = outcome
            self._over.set()
