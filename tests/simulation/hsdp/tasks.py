"""Coroutines of simulated processes in virtual time, and collective operations between the ranks of a replica."""

from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.hsdp.world import World

_SPREAD_S = (0.0005, 0.004)
"""Virtual seconds (least, most) of a message between the ranks of a replica."""


class Sleep:
    """Awaited by a coroutine that does nothing for ``seconds`` of virtual time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __await__(self) -> Generator[Any, None, None]:
        yield self


class Signal:
    """An event that happens once, with a value; coroutines await it."""

    def __init__(self):
        self.is_set, self._value = False, None
        self._waiting: list[Task] = []

    def set(self, value: Any = None) -> None:
        if not self.is_set:
            self.is_set, self._value = True, value
            for task in self._waiting:
                task.go_on_after(0.0)

    def add(self, task: "Task") -> None:
        self._waiting.append(task)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_set:
            yield self
        return self._value


class Task:
    """A thread of a simulated process.

    Args:
        do: runs an action in the process after some seconds, later if it is paused, never if it has ended.
        coroutine: what the thread does.
        failed: called with the reason if the process has to end.
    """

    def __init__(self, do: Callable[..., None], coroutine: Coroutine, failed: Callable[[str], None]):
        self._do, self._coroutine, self._failed = do, coroutine, failed

    def go_on_after(self, seconds: float) -> None:
        self._do(seconds, self._go_on)

    def _go_on(self) -> None:
        try:
            awaited = self._coroutine.send(None)
        except StopIteration:
            return
        except SystemExit as end:
            self._failed(str(end))
            return
        if isinstance(awaited, Signal):
            awaited.add(self)
        else:
            self.go_on_after(awaited.seconds)


class Group:
    """Collective operations between the ranks of a replica. All ranks call them equally often, in the same order.

    Args:
        world: the simulated run.
        ranks: number of ranks.
    """

    def __init__(self, world: "World", ranks: int):
        self._world, self._ranks = world, ranks
        self._calls = [0] * ranks
        self._rounds: dict[int, tuple[list[Any], Signal]] = {}

    async def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values that all ranks give."""
        values, signal = self._round(rank)
        values.append(value)
        if len(values) == self._ranks:
            signal.set()
        return await self._received(signal) or values

    async def broadcast(self, rank: int, value: Any) -> Any:
        """Return the value that rank 0 gives."""
        _, signal = self._round(rank)
        if rank == 0:
            signal.set(value)
            return value
        return await self._received(signal)

    def _round(self, rank: int) -> tuple[list[Any], Signal]:
        call = self._calls[rank]
        self._calls[rank] += 1
        self._rounds.pop(min(self._calls) - 2, None)
        return self._rounds.setdefault(call, ([], Signal()))

    async def _received(self, signal: Signal) -> Any:
        value = await signal
        if self._ranks > 1:
            await Sleep(self._world.rng.uniform(*_SPREAD_S))
        return value
