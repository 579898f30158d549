"""Exchanges control messages about a checkpoint between ranks, as JSON over a dedicated gloo process group, and runs
the background work of a save, which waits for them.

A rank starts the collectives of this group when its writer has finished, which is at a different step on every rank. So
they must not be mixed with the collectives of training, whose order is the same on all ranks. The group uses gloo,
because the messages are small.

Background work is a generator, so that the training loop can advance it between steps without waiting. When it has to
wait for an operation, it yields a :class:`Pending` object; at its end it returns its result. ``finish`` runs a
generator to its end; :class:`Progress` runs it as far as possible without waiting.
"""

import json
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ft.base import bounded_json

# Timeout of the group. A rank whose writer has finished waits in this group for the slowest rank. A slow disk is not a
# failure, and a dead rank is detected by the collectives of training, so the timeout is far longer than either takes.
SLOWEST_WRITE = timedelta(hours=6)
_HEADER = 8


class Pending(Protocol):
    """An operation in progress that a generator waits for: a collective, a thread or a forked process."""

    def done(self) -> bool:
        """Return whether ``wait`` would return at once. Takes microseconds."""

    def wait(self) -> None:
        """Block until the operation is done."""


class _Collective:
    """A collective in progress, as an operation that a generator can wait for."""

    def __init__(self, work: dist.Work):
        self._work = work

    def done(self) -> bool:
        """Return whether the collective has ended."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Block until the collective has ended."""
        self._work.wait()


class Channel:
    """Exchanges small JSON values among all ranks. All ranks have to call every method, in the same order."""

    def __init__(self):
        self.group = dist.new_group(backend="gloo", timeout=SLOWEST_WRITE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gathering(self, value: Any) -> Generator[Pending, None, list | None]:
        """Gather the values of all ranks on rank 0.

        A generator: it yields while the collective is in progress, and returns the list of all values on rank 0 and
        None on the other ranks.
        """
        mine = yield from self._padded(value)
        parts = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        yield _Collective(dist.gather(mine, parts, dst=0, group=self.group, async_op=True))
        return [_decode(p) for p in parts] if parts is not None else None

    def sharing(self, value: Any) -> Generator[Pending, None, list]:
        """Gather the values of all ranks on every rank.

        A generator: it yields while the collective is in progress, and returns the list of all values.
        """
        mine = yield from self._padded(value)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        yield _Collective(dist.all_gather(parts, mine, group=self.group, async_op=True))
        return [_decode(p) for p in parts]

    def broadcasting(self, value: Any) -> Generator[Pending, None, Any]:
        """Send rank 0's value to all ranks.

        A generator: it yields while the collective is in progress, and returns rank 0's value.
        """
        data = yield from self._padded(value if self.rank == 0 else None)
        yield _Collective(dist.broadcast(data, src=0, group=self.group, async_op=True))
        return _decode(data)

    def share(self, value: Any) -> list:
        """Return the values of all ranks, on every rank. Block until all ranks have called it."""
        return finish(self.sharing(value))

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Block until rank 0 has called it."""
        return finish(self.broadcasting(value))

    def close(self) -> None:
        """Destroy the process group, unless torch.distributed was shut down already."""
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _padded(self, value: Any) -> Generator[Pending, None, torch.Tensor]:
        """Encode ``value`` as bytes, padded to the length of the longest value of all ranks.

        A generator: it yields while the ranks agree on that length, and returns the bytes, [length] uint8.
        """
        data = json.dumps(value).encode()
        longest = torch.tensor([len(data)])
        yield _Collective(dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        padded = bytearray(_HEADER + int(longest))
        padded[:_HEADER] = len(data).to_bytes(_HEADER, "little")
        padded[_HEADER : _HEADER + len(data)] = data
        return torch.frombuffer(padded, dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    raw = data.numpy().tobytes()
    length = int.from_bytes(raw[:_HEADER], "little")
    return bounded_json.loads(raw[_HEADER : _HEADER + length], non_finite=True)


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
