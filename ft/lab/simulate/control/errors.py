"""Exceptions that interrupt the training thread of a simulated worker (``ft simulate control``)."""


class EpochClosed(Exception):
    """The control plane has closed the epoch after a failure, so that the worker abandons its step and recovers."""


class Exited(Exception):
    """The worker's process exits with ``code``."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Broken(Exception):
    """An exception raised by the worker's own code.

    Attributes:
        kinds: names of the exception's class and its base classes, as in ``ft.job.messages.WorkerFailed``.
        message: text of the exception.
    """

    def __init__(self, kinds: list[str], message: str):
        super().__init__(message)
        self.kinds, self.message = kinds, message
