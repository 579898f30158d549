"""Background work of a save as generators, so that the training loop can advance it between steps without waiting.

When such a generator has to wait for an operation, it yields a :class:`Pending` object; at its end it returns its
result. ``finish`` runs a generator to its end; :class:`Progress` runs it as far as possible without waiting.
"""

import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol


class Pending(Protocol):
    """An operation in progress that a generator waits for: a collective, a thread or a forked process."""

    def done(self) -> bool:
        """Return whether ``wait`` would return at once. Takes microseconds."""

    def wait(self) -> None:
        """Block until the operation is done."""


class InThread:
    """Runs ``function`` in a thread. ``wait`` re-raises its exception; after that ``result`` is its return value."""

    def __init__(self, function: Callable[[], Any]):
        self.result = None
        self._error: BaseException | None = None

        def run():
            try:
                self.result = function()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint-commit", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Progress:
    """A generator in progress.

    Attributes:
        result: the generator's return value, once ``advance`` has returned True.
    """

    def __init__(self, steps: Generator[Pending, None, Any]):
        self._steps = steps
        self._waits_for: Pending | None = None
        self.result = None

    def advance(self, blocking: bool) -> bool:
        """Run the generator as far as possible, or to the end if ``blocking``. Return whether it has ended."""
        while True:
            if self._waits_for is not None:
                if not blocking and not self._waits_for.done():
                    return False
                self._waits_for.wait()
            try:
                self._waits_for = next(self._steps)
            except StopIteration as stop:
                self.result = stop.value
                return True

    def abandon(self) -> None:
        """Close the generator at its current position. Its ``finally`` clauses run."""
        self._steps.close()


def finish(steps: Generator[Pending, None, Any]) -> Any:
    """Run a generator to its end, and return its result."""
    progress = Progress(steps)
    progress.advance(blocking=True)
    return progress.result
