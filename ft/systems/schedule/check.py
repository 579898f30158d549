"""Simulate a pipeline schedule, and check whether it can run.

``play`` simulates buffered messages: a stage waits only for the inputs of its units. ``run`` simulates unbuffered ones,
as with NCCL: a send waits for its receive, and vice versa. The checks (each unit once, inputs in time, equal order of
messages, no deadlock, memory) do not depend on how the program was made.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ft.systems.schedule.program import Batch, Program, Unit, posted


class ScheduleTimes(NamedTuple):
    """The result of a simulation.

    Attributes:
        free: unit -> time from which on its stage can run the next unit.
    """

    times: Mapping[Unit, tuple[float, float]]
    free: Mapping[Unit, float]


class ScheduleDeadlock(Exception):
    """The given orders of units cannot be executed, because stages wait for each other.

    Args:
        units: the next unit of each unfinished stage.
    """

    def __init__(self, units: Sequence[Unit]):
        self.units = tuple(units)
        super().__init__(f"stages wait for each other: {', '.join(map(str, self.units))}")


def play(
    order: Sequence[Sequence[Unit]],
    needs: Callable[[Unit], Unit | None],
    duration: Callable[[Unit], float],
    *,
    comm_us: float = 0.0,
    waits_until_sent: Callable[[Unit], bool] | None = None,
    behind: Callable[[Unit], float] | None = None,
) -> ScheduleTimes:
    """Simulate the orders with buffered messages: a sender never waits for its receiver.

    Args:
        order: each stage's units, in the order in which it runs them.
        needs: returns the unit whose result a unit waits for; None if it waits for nothing.
        comm_us: time from the end of a unit until its result is at another stage.
        waits_until_sent: returns True for units after which the stage waits ``comm_us`` before it continues; None if no
            stage ever does.
        behind: returns the work that a stage does after a unit and before its next one, while the unit's message is in
            flight.

    Raises:
        ScheduleDeadlock: the orders cannot be executed.
    """
    times: dict[Unit, tuple[float, float]] = {}
    free: dict[Unit, float] = {}
    done = [0] * len(order)
    left = sum(map(len, order))
    while left:
        before = left
        for stage, units in enumerate(order):
            while done[stage] < len(units):
                unit = units[done[stage]]
                source = needs(unit)
                if source is not None and source not in times:
                    break
                ready = free[units[done[stage] - 1]] if done[stage] else 0.0
                start = max(ready, _arrival(source, stage, times, comm_us))
                end = start + duration(unit)
                times[unit] = (start, end)
                free[unit] = end + (behind(unit) if behind else 0.0)
                if waits_until_sent is not None and waits_until_sent(unit):
                    free[unit] = max(free[unit], end + comm_us)
                done[stage] += 1
                left -= 1
        if left == before:
            raise ScheduleDeadlock([units[at] for units, at in zip(order, done, strict=True) if at < len(units)])
    return ScheduleTimes(times, free)


def _arrival(source: Unit | None, stage: int, times: Mapping[Unit, tuple[float, float]], comm_us: float) -> float:
    if source is None:
        return 0.0
    return times[source][1] + (comm_us if source.stage != stage else 0.0)


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation.

    Args:
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
    concurrent, as in one NCCL group.

    Args:
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

    def _post(self, stage: int, source: int, target: int) -> tuple[tuple[int, int, bool], int]:
        key = (source, target, source == stage)
        posts = self._posted.setdefault(key, [])
        posts.append(self.clock[stage])
        return key, len(posts) - 1


class RuleResult(NamedTuple):
    """The result of checking one rule.

    Attributes:
        faults: violations in words; empty if the rule holds.
    """

    rule: str
    faults: tuple[str, ...]


def check(program: Program, most_in_flight: Sequence[int] | None = None) -> list[RuleResult]:
    """Check all rules and return the results.

    Args:
        most_in_flight: for each stage, the number of microbatches whose activations it may hold; None for no limit.
    """
    findings = [
        RuleResult("every unit once, after what it needs", tuple(_units(program))),
        RuleResult("message order per pair", tuple(_message_order(program))),
        RuleResult("no deadlock", tuple(_deadlock(program))),
    ]
    if most_in_flight is not None:
        findings.append(RuleResult("memory", tuple(_memory(program, most_in_flight))))
    return findings


def _units(program: Program):
    """Yield violations of the rule that each unit runs exactly once, and after its input has arrived."""
    routes = program.routes
    wanted = Counter(unit for microbatch in range(len(routes.ways)) for unit in routes.units(microbatch))
    for unit in (Counter(unit for s in range(len(program.stages)) for unit in program.order(s)) - wanted).elements():
        yield f"{named(unit)} must not run on stage {unit.stage}, or runs there twice"
    there: set[tuple[int, Unit]] = set()
    for stage, steps in enumerate(program.stages):
        for step in steps:
            if not isinstance(step, Unit):
                there.update((stage, message.unit) for message in step if message.target == stage)
                lacking = [
                    message for message in step if message.source == stage and (stage, message.unit) not in there
                ]
                yield from (
                    f"stage {stage} sends the result of {named(message.unit)} before it has it" for message in lacking
                )
                continue
            wanted.subtract((step,))
            source = routes.needs(step)
            if source is not None and (stage, source) not in there:
                yield f"{named(step)} starts on stage {stage} before the result of {named(source)} is there"
            there.add((stage, step))
    for unit in (+wanted).elements():
        yield f"{named(unit)} never runs on stage {unit.stage}"


def _message_order(program: Program):
    """Yield violations of the rule that, between two stages, messages are received in the order in which they are sent.

    The rule is needed because NCCL has no message tags.
    """
    sent, received = posted(program)
    for pair in sorted(sent.keys() | received.keys()):
        ours, theirs = sent.get(pair, []), received.get(pair, [])
        at = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if at is not None:
            yield (
                f"{pair[0]} -> {pair[1]}: message {at + 1} sent is the result of {named(ours[at])}, "
                f"received as that of {named(theirs[at])}"
            )
        elif len(ours) != len(theirs):
            yield f"{pair[0]} -> {pair[1]}: {len(ours)} sent, {len(theirs)} received"


def _deadlock(program: Program):
    """Yield the stages that never finish if every send waits for its receiver."""
    for stage, batch in run(program, lambda unit: 1.0).stuck.items():
        yield f"stage {stage} waits for ever to {' and '.join(_doing(stage, batch))}"


def _doing(stage: int, batch: Batch):
    for source, target, unit in batch:
        verb = f"send to {target}" if source == stage else f"receive from {source}"
        yield f"{verb} the result of {named(unit)}"


def _memory(program: Program, most: Sequence[int]):
    for stage, (held, allowed) in enumerate(zip(in_flight(program), most, strict=True)):
        if held > allowed:
            yield f"stage {stage} holds {held} microbatches at once, {allowed} allowed"


def in_flight(program: Program) -> list[int]:
    """Return for each stage the maximum number of microbatches whose activations it holds at once.

    A stage holds the activations of a microbatch from the forward to the backward.
    """
    return [peak(program.order(stage)) for stage in range(len(program.stages))]


def peak(units: Sequence[Unit]) -> int:
    """Return the maximum number of forwards whose backward has not run yet, over the sequence ``units``."""
    held = most = 0
    for unit in units:
        held += -1 if unit.backward else 1
        most = max(most, held)
    return most


def named(unit: Unit) -> str:
    """Return a short name of a unit, "F3" or "B3" for microbatch 3, with the chunk unless it is chunk 0."""
    return f"{'B' if unit.backward else 'F'}{unit.microbatch}" + (f" of chunk {unit.chunk}" if unit.chunk else "")
