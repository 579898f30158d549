"""Work that goes on while training does: generators that yield what they wait for.

A generator of this package's kind yields :class:`Pending` things and returns its result. ``finish`` runs one to its
end; :class:`Progress` runs one as far as it gets without waiting.
"""

import threading
from collections.abc import Callable, Generator
from typing import Any, Protocol


class Pending(Protocol):
    def done(self) -> bool:
        """Whether ``wait`` would return at once; costs microseconds."""

    def wait(self) -> None:
        """Returns when it is done."""


class InThread:
    """Runs ``function`` in a thread; ``result`` is what it returned, after ``wait``, which raises what it raised."""

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
    """A generator on its way; ``result`` is what it returned once ``advance`` said True."""

    def __init__(self, steps: Generator[Pending, None, Any]):
        self._steps = steps
        self._waits_for: Pending | None = None
        self.result = None

    def advance(self, blocking: bool) -> bool:
        """Goes on as far as possible, or to the end if ``blocking``; whether the end was reached."""
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
        """Drops the generator where it is; its ``finally`` clauses run."""
        self._steps.close()


def finish(steps: Generator[Pending, None, Any]) -> Any:
    """Runs a generator to its end and returns its result."""
    progress = Progress(steps)
    progress.advance(blocking=True)
    return progress.result
