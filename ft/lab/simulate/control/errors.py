"""Exceptions that end what a simulated training thread is doing."""


class EpochClosed(Exception):
    """The epoch is closed: the step is abandoned."""


class Exited(Exception):
    """The process exits with ``code``."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Broken(Exception):
    """An exception raised by the worker's own code; ``kinds`` as in ``ft.job.messages.WorkerFailed``."""

    def __init__(self, kinds: list[str], message: str):
        super().__init__(message)
        self.kinds, self.message = kinds, message
