"""How an all-reduce ended, and the handle of one that has not yet."""

import threading
from dataclasses import dataclass

from ft.base.errors import RecoverableError


@dataclass(frozen=True)
class Outcome:
    """What came of an operation.

    Attributes:
        ok: the tensor holds the result. Otherwise it holds nothing of use, and the step is to be tried again.
        reason: why not, in words.
        suspect: index of the member that seems to be the cause; None: not known.
        skipped: it was never begun.
    """

    ok: bool
    reason: str = ""
    suspect: int | None = None
    skipped: bool = False


class Broken(RecoverableError):
    """The ring of this quorum is of no use any more; it takes another one.

    Args:
        reason: in words. suspect: index of the member that seems to be the cause; None: not known.
    """

    def __init__(self, reason: str, suspect: int | None = None):
        self.reason, self.suspect = reason, suspect
        super().__init__(reason)


class Pending:
    """An operation that was asked for."""

    def __init__(self):
        self._over = threading.Event()
        self._outcome: Outcome | BaseException | None = None

    def wait(self) -> Outcome:
        """Waits until it is over, which has a deadline (:meth:`Ring.expect`).

        Raises:
            UserError: the arguments cannot work. Any other exception: this process is at fault, trying again is of no
                use; what the caller's own ``after`` raised is passed on.
        """
        self._over.wait()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, outcome: Outcome | BaseException) -> None:
        """For the driver: how it ended. The first word counts."""
        if not self._over.is_set():
            self._outcome = outcome
            self._over.set()
