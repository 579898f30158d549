"""Simulate a program with unbuffered messages: both ends of a message wait until both have posted it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ft.systems.schedule.program import Batch, Program
from ft.systems.schedule.units import Unit


@dataclass(frozen=True)
class Ran:
    """The result of a simulation.

    Args:
        times: unit -> (start, end).
        end: when the last stage had finished, including its last message.
        stuck: stage -> the batch at which it waits for ever; empty if all stages finished.
    """

    times: Mapping[Unit, tuple[float, float]]
    end: float
    stuck: Mapping[int, Batch]


def run(program: Program, duration: Callable[[Unit], float], comm: float = 0.0) -> Ran:
    """Simulate the program.

    The k-th send of one stage to another pairs with the k-th receive of the other from it, whatever they were meant to
    carry; ``ft.systems.schedule.check`` checks that. A pair takes ``comm`` from the moment when both have posted, and a
    stage continues when all of its batch is complete. Pairs of one batch are concurrent, as in one NCCL group. At a
    flush, an empty batch, every stage waits for all others.
    """
    machine = _Machine(program, duration, comm)
    moved = True
    while moved:
        moved = sum(machine.advance(stage) for stage in range(len(program.stages))) > 0
    stuck = {
        stage: steps[at]
        for stage, (steps, at) in enumerate(zip(program.stages, machine.at, strict=True))
        if at < len(steps)
    }
    return Ran(machine.times, max(machine.clock), stuck)


class _Machine:
    def __init__(self, program: Program, duration: Callable[[Unit], float], comm: float):
        self._program, self._duration, self._comm = program, duration, comm
        self.at = [0] * len(program.stages)
        self.clock = [0.0] * len(program.stages)
        self.times: dict[Unit, tuple[float, float]] = {}
        self._posted: dict[tuple[int, int, bool], list[float]] = {}
        self._flushes: dict[int, dict[int, float]] = {}
        self._open: dict[int, list[tuple[tuple[int, int, bool], int]]] = {}

    def advance(self, stage: int) -> bool:
        """Advance the stage as far as possible; return whether it advanced."""
        steps, before = self._program.stages[stage], (self.at[stage], stage in self._open)
        while self.at[stage] < len(steps):
            step = steps[self.at[stage]]
            start = self.clock[stage]
            if isinstance(step, Unit):
                self.clock[stage] = start + self._duration(step)
                self.times[step] = (start, self.clock[stage])
            elif not self._passed(stage, step):
                break
            self.at[stage] += 1
        return (self.at[stage], stage in self._open) != before

    def _passed(self, stage: int, batch: Batch) -> bool:
        """Post the batch if that has not been done, and complete it if all its partners have posted."""
        if not batch:
            return self._flushed(stage)
        if stage not in self._open:
            self._open[stage] = [self._post(stage, *message[:2]) for message in batch]
        partners = []
        for (source, target, sends), k in self._open[stage]:
            theirs = self._posted.get((source, target, not sends), ())
            if k >= len(theirs):
                return False
            partners.append(theirs[k])
        self.clock[stage] = max(self.clock[stage], *partners) + self._comm
        del self._open[stage]
        return True

    def _flushed(self, stage: int) -> bool:
        """Return whether all stages have reached this flush; the stage's clock is then set to the latest of them."""
        seen = sum(not step for step in self._program.stages[stage][: self.at[stage]])
        arrived = self._flushes.setdefault(seen, {})
        arrived.setdefault(stage, self.clock[stage])
        if len(arrived) < len(self.at):
            return False
        self.clock[stage] = max(arrived.values())
        return True

    def _post(self, stage: int, source: int, target: int) -> tuple[tuple[int, int, bool], int]:
        key = (source, target, source == stage)
        posts = self._posted.setdefault(key, [])
        posts.append(self.clock[stage])
        return key, len(posts) - 1
