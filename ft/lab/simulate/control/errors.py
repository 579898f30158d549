"""How a simulated training thread leaves what it is at."""


class EpochClosed(Exception):
    """The epoch is over: the step is left."""


class Exited(Exception):
    """The process ends itself with ``code``."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Broken(Exception):
    """An exception of the worker's own; ``kinds`` as ``ft.job.messages.WorkerFailed`` has them."""

    def __init__(self, kinds: list[str], message: str):
        super().__init__(message)
        self.kinds, self.message = kinds, message
