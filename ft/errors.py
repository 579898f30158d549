"""The exception taxonomy: what an error asks of whoever catches it.

=====================  =========================================================================
raised class           what has to happen
=====================  =========================================================================
``UserError``          stop before anything is lost; print the message (problem and fix), no trace
``RecoverableError``   the worker is sound; the operation is tried again in place
``ReplaceNodeError``   the worker or its node is lost; a standby takes its logical ranks
``FallbackError``      what was asked for is gone; the next source of the same state is tried
=====================  =========================================================================
"""


class FtError(Exception):
    """Base of every error this project raises on purpose."""


class UserError(FtError):
    """The input cannot work: flags, files or environment.

    Args:
        problem: what is wrong, with the numbers or the path it is about.
        fix: what the user can do; printed on its own line.
    """

    exit_code = 2

    def __init__(self, problem: str, fix: str | None = None):
        self.problem, self.fix = problem, fix
        super().__init__(problem if fix is None else f"{problem}\n  fix: {fix}")


class RecoverableError(FtError):
    """A transient failure: retry in place."""


class ReplaceNodeError(FtError):
    """The worker or its node cannot go on: hand its logical ranks to a standby."""


class FallbackError(FtError):
    """This copy of the state is unusable: use the next rung (peer copy, older checkpoint)."""


class EpochClosed(RecoverableError):
    """The epoch this operation belongs to is over: leave the step, and wait for the next epoch.

    Args:
        epoch: the epoch that was closed.
        reason: why, in words.
    """

    def __init__(self, epoch: int, reason: str):
        self.epoch, self.reason = epoch, reason
        super().__init__(f"epoch {epoch} is closed: {reason}")
