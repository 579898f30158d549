"""Injects faults into simulated steps and counts how often the production code names the rank and the kind."""

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ft.faults.hang.causes import Diagnosis
from ft.faults.hang.series import over_time
from ft.lab.simulate.hangs.faults import KINDS, LAYOUTS, STEP, Injected
from ft.lab.simulate.hangs.machine import Machine
from ft.lab.simulate.hangs.program import Layout, programs

_STEPS = 4
_SLOW_STEPS = 6
_LOOKS = 40


@dataclass(frozen=True)
class Case:
    """One injected fault and what was said of it.

    Attributes:
        seed: random seed of the case.
        layout: the layout.
        fault: name of the fault.
        expected: logical rank -> kind.
        found: (logical rank, kind) of each cause, the most certain first.
        rank_is_right: whether the first causes name exactly the ranks at fault.
        kind_is_right: whether their kinds are right, too.
        innocents: ranks that are named although nothing is wrong there.
    """

    seed: int
    layout: Layout
    fault: str
    expected: dict[int, str]
    found: tuple[tuple[int, str], ...]
    rank_is_right: bool
    kind_is_right: bool
    innocents: tuple[int, ...]


@dataclass
class Tally:
    """Numbers of one kind of fault."""

    cases: int = 0
    ranks: int = 0
    kinds: int = 0
    innocents: int = 0
    misses: list[Case] = field(default_factory=list)


def case(seed: int) -> Case | None:
    """Run one case. Return None if the seed's fault makes nothing hang or slow, or finds no place in its layout."""
    choice = random.Random(seed)
    layout, fault = choice.choice(LAYOUTS), choice.choice(sorted(KINDS))
    all_ = programs(layout)
    injected = KINDS[fault](all_, choice)
    if injected is None:
        return None
    steps = _SLOW_STEPS if injected.factor else _STEPS
    machine = Machine(all_, steps, injected.wrong, STEP, choice)
    if injected.factor:
        found = _watch(machine, layout, choice, injected)
        expected = injected.kinds
    else:
        machine.run()
        look = machine.look()
        if all(rank.ended for rank in look.ranks.values()):
            return None
        expected = {rank: kind for rank, kind in injected.kinds.items() if machine.is_wrong(rank)}
        found = over_time([look])
    return _judge(seed, layout, fault, expected, found)


def _watch(machine: Machine, layout: Layout, choice: random.Random, injected: Injected) -> Diagnosis:
    """Return the diagnosis over looks at random moments of the steps."""
    length = _length(layout, injected, choice)
    moments = sorted(choice.uniform(0.2, 0.9) * length for _ in range(_LOOKS))
    looks = []
    for moment in moments:
        machine.run(moment)
        looks.append(machine.look())
    return over_time(looks)


def _length(layout: Layout, injected: Injected, choice: random.Random) -> float:
    """Return how long the steps of a run with this fault take."""
    machine = Machine(programs(layout), _SLOW_STEPS, injected.wrong, STEP, random.Random(choice.random()))
    machine.run()
    return machine.now


def _judge(seed: int, layout: Layout, fault: str, expected: dict[int, str], found: Diagnosis) -> Case:
    named = tuple((cause.rank, cause.kind) for cause in found.causes)
    first = named[: len(expected)]
    # of two ranks at fault, one may delay nobody because of the other
    waited_for = {edge.on for edge in found.waiting}
    due = {rank: kind for rank, kind in expected.items() if len(expected) == 1 or rank in waited_for}
    rank_is_right = {rank for rank, _ in first} & due.keys() == due.keys()
    return Case(
        *(seed, layout, fault, expected, named),
        rank_is_right=rank_is_right,
        kind_is_right=rank_is_right and all(expected[rank] == kind for rank, kind in first if rank in due),
        innocents=tuple(sorted({rank for rank, _ in named} - expected.keys())),
    )


def count(cases: Iterable[Case]) -> dict[str, Tally]:
    """Return the numbers by fault, and under "all" those of all."""
    found: dict[str, Tally] = defaultdict(Tally)
    for one in cases:
        for tally in (found[one.fault], found["all"]):
            tally.cases += 1
            tally.ranks += one.rank_is_right
            tally.kinds += one.kind_is_right
            tally.innocents += bool(one.innocents)
            if not (one.rank_is_right and one.kind_is_right):
                tally.misses.append(one)
    return found
