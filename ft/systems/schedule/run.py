"""Simulate a pipeline schedule with unbuffered messages, as with NCCL: a send waits for its receive, and vice versa.

The schedule is a :class:`Program`: for each stage, a sequence of units (the forward or backward of one microbatch) and
batches of messages (each batch is one ``batch_isend_irecv``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ft.systems.schedule.program import Batch, Program
from ft.systems.schedule.units import Unit


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation.

    Args:
        times: unit -> (start, end).
        end: time at which the last stage has finished, including its last message.
        stuck: stage -> the batch at which the stage waits for ever; empty if all stages have finished.
    """

    times: Mapping[Unit, tuple[float, float]]
    end: float
    stuck: Mapping[int, Batch]


def run(program: Program, duration: Callable[[Unit], float], comm: float = 0.0) -> SimulationResult:
    """Simulate the program.

    The k-th send from stage A to stage B matches the k-th receive of B from A, even if they are different messages in
    the program; ``ft.systems.schedule.check`` finds such errors. A message takes ``comm`` from the time at which both
    stages have posted it. A stage continues when all messages of its batch are complete. The messages of a batch are
    concurrent, as in one NCCL group. At a flush, an empty batch, every stage waits for all others.

    Args:
        program: the program.
        duration: returns the time of a unit (of work), in any unit of time.
        comm: time of a message, in the same unit of time.
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
    return SimulationResult(machine.times, max(machine.clock), stuck)


class _Machine:
    """The state of the simulation.

    Args:
        program: the program.
        duration: returns the time of a unit.
        comm: time of a message.

    Attributes:
        at: for each stage, the index of its present step (unit or batch).
        clock: for each stage, the time at which it has reached that step.
        times: unit -> (start, end).
    """

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
        """Post the messages of a batch if that has not been done; return whether the batch is complete.

        A batch is complete if the other stages have posted their ends of all its messages.
        """
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
