"""The exception hierarchy of ``ft``: the class of an exception determines how a failure is handled.

=====================  =========================================================================
exception class        how the failure is handled
=====================  =========================================================================
``UserError``          the run stops before anything is lost; the message is printed without a traceback
``RecoverableError``   the worker keeps running and retries the operation
``ReplaceNodeError``   the worker or its node is lost; a standby takes its logical ranks
``DeviceUnusable``     the worker's device is lost; another worker takes its logical rank on another device
``FallbackError``      this copy of the training state is unusable; the next copy is tried
``LastSaveFailed``     the run ends as planned, with the exit code ``NOT_SAVED``
=====================  =========================================================================
"""

import os
import re
from collections.abc import Iterable, Sequence

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Problem = tuple[str, str | None]
"""What is wrong, and how to fix it."""

NOT_SAVED = os.EX_IOERR
"""Exit code (74) of a run that has ended as planned, but could not save its last checkpoint."""
ENDED_EARLY = os.EX_TEMPFAIL
"""Exit code (75) of a run that a signal has ended before its last step; another run can go on where it ended."""
NOT_INJECTED = 76
"""Exit code of ``ft run --inject-strict`` if a run ends well, but not all planned faults were injected."""
PLANNED_ENDS = (0, NOT_SAVED, ENDED_EARLY)
"""Exit codes of runs that have ended as planned, so that nothing is to be repaired or started again."""


def code_of_end(early: str, unsaved: str) -> int:
    """Return the exit code of a planned end.

    Args:
        early: name of the signal that has ended the run before its last step, "" if none has.
        unsaved: why the last checkpoint could not be saved, "" if it was saved, or none was to be.
    """
    return NOT_SAVED if unsaved else ENDED_EARLY if early else 0


def plain(text: str) -> str:
    r"""Return a text in which control characters are visible, such as \x1b: a terminal would obey them."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


class FtError(Exception):
    """Base class of every error that this project raises on purpose."""


class UserError(FtError):
    """An error in the user's input: in flags, files or the environment.

    Args:
        problem: what is wrong, with the numbers or the path concerned; control characters in it become visible.
    """

    exit_code = 2

    def __init__(self, problem: str, fix: str | None = None):
        problem, fix = plain(problem), None if fix is None else plain(fix)
        self.problem, self.fix = problem, fix
        self.problems: list[Problem] = [(problem, fix)]
        super().__init__(problem if fix is None else f"{problem}\n  fix: {fix}")

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> "UserError":
        """Combine ``problems`` (at least one) into one error.

        Several problems are printed as a numbered list, each with its fix.
        """
        if len(problems) == 1:
            return cls(*problems[0])
        items = []
        for number, (problem, fix) in enumerate(problems, 1):
            lines = [*problem.splitlines(), *([] if fix is None else [f"fix: {fix}"])]
            items.append(f"{number}. " + "\n   ".join(lines))
        error = cls(f"{len(problems)} problems\n" + "\n".join(items))
        error.problems = list(problems)
        return error


class Problems:
    """Collects all problems of the input, so that the user learns of all of them at once: ``with problems: check()``.

    Attributes:
        found: (problem, fix) pairs, each once.
    """

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, problems: Iterable[Problem]) -> None:
        self.found += [problem for problem in problems if problem not in self.found]

    def refuse(self) -> None:
        """Raise an error if problems were found.

        Raises:
            UserError: contains every problem that was found.
        """
        if self.found:
            raise UserError.of(self.found)

    def __enter__(self) -> "Problems":
        return self

    def __exit__(self, kind, error, trace) -> bool:
        if not isinstance(error, UserError):
            return False
        self.add(error.problems)
        return True


class RecoverableError(FtError):
    """A transient failure: retry in place."""


class ReplaceNodeError(FtError):
    """The worker or its node cannot continue: a standby takes over its logical rank."""


class DeviceUnusable(FtError):
    """The worker's device cannot be used: another worker takes over its logical rank, on another device."""


class FallbackError(FtError):
    """This copy of the training state is unusable: use the next one (another rank's copy, or an older checkpoint)."""


class LastSaveFailed(FtError):
    """The last checkpoint of the run cannot be saved: the run ends, with the exit code ``NOT_SAVED``."""


class EpochClosed(RecoverableError):
    """The epoch that this operation belongs to is over: leave the step, and wait for the next epoch."""

    def __init__(self, epoch: int, reason: str):
        self.epoch, self.reason = epoch, reason
        super().__init__(f"epoch {epoch} is closed: {reason}")
