"""Check whether a pipeline schedule can run: each unit once, inputs in time, equal order of messages, no deadlock,
memory.

A schedule is a :class:`Program`: for each stage, its units (the forward or backward of one microbatch) and batches of
messages. The checks do not depend on how the program was made.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ft.systems.schedule.program import Batch, Program, posted
from ft.systems.schedule.run import run
from ft.systems.schedule.units import Unit


class Finding(NamedTuple):
    """The result of checking one rule.

    Attributes:
        rule: the rule in words.
        faults: violations in words; empty if the rule holds.
    """

    rule: str
    faults: tuple[str, ...]


def check(program: Program, most_in_flight: Sequence[int] | None = None) -> list[Finding]:
    """Check all rules and return the results.

    Args:
        program: the program.
        most_in_flight: for each stage, the number of microbatches whose activations it may hold; None for no limit.
    """
    findings = [
        Finding("every unit once, after what it needs", tuple(_units(program))),
        Finding("message order per pair", tuple(_message_order(program))),
        Finding("no deadlock", tuple(_deadlock(program))),
    ]
    if most_in_flight is not None:
        findings.append(Finding("memory", tuple(_memory(program, most_in_flight))))
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
