"""Injects faults into simulated steps, and counts how often the production code names the rank and the kind."""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from ft.base import quantities
from ft.faults.hang.causes import Diagnosis, over_time
from ft.show.text import table
from tests.simulation.hangs.faults import KINDS, LAYOUTS, STEP, Injected
from tests.simulation.hangs.machine import Layout, Machine, Programs, programs

# --- cases ------------------------------------------------------------------------------------------------------------

_STEPS = 4
_SLOW_STEPS = 6
_INSPECTIONS = 40


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


@dataclass(frozen=True)
class Chosen:
    """A layout and a fault in it, drawn by a seed.

    Attributes:
        seed: random seed.
        layout: the layout.
        fault: name of the fault, of ``faults.KINDS``.
        programs: what the ranks of the layout do.
        injected: the fault.
        choice: random numbers for what follows.
    """

    seed: int
    layout: Layout
    fault: str
    programs: Programs
    injected: Injected
    choice: random.Random

    def hangs(self, steps: int) -> Machine | None:
        """Return the simulated machine after the fault has stopped it; None if it makes nothing hang."""
        machine = Machine(self.programs, steps, self.injected.wrong, STEP, self.choice)
        machine.run()
        return None if all(rank.ended for rank in machine.inspect().ranks.values()) else machine


def choose(seed: int, layouts: Sequence[Layout] = LAYOUTS, faults: Iterable[str] = KINDS) -> Chosen | None:
    """Draw a layout and a fault; None if the fault finds no place in the layout."""
    choice = random.Random(seed)
    layout, fault = choice.choice(layouts), choice.choice(sorted(faults))
    all_ = programs(layout)
    injected = KINDS[fault](all_, choice)
    return None if injected is None else Chosen(seed, layout, fault, all_, injected, choice)


def case(seed: int) -> Case | None:
    """Run one case. Return None if the seed's fault makes nothing hang or slow, or finds no place in its layout."""
    chosen = choose(seed)
    if chosen is None:
        return None
    if chosen.injected.factor:
        return judge(chosen, chosen.injected.kinds, _watch(chosen))
    machine = chosen.hangs(_STEPS)
    if machine is None:
        return None
    expected = {rank: kind for rank, kind in chosen.injected.kinds.items() if machine.is_wrong(rank)}
    return judge(chosen, expected, over_time([machine.inspect()]))


def _watch(chosen: Chosen) -> Diagnosis:
    """Return the diagnosis over inspections of random moments of the steps."""
    machine = Machine(chosen.programs, _SLOW_STEPS, chosen.injected.wrong, STEP, chosen.choice)
    length = _length(chosen.layout, chosen.injected, chosen.choice)
    moments = sorted(chosen.choice.uniform(0.2, 0.9) * length for _ in range(_INSPECTIONS))
    inspections = []
    for moment in moments:
        machine.run(moment)
        inspections.append(machine.inspect())
    return over_time(inspections)


def _length(layout: Layout, injected: Injected, choice: random.Random) -> float:
    """Return how long the steps of a run with this fault take."""
    machine = Machine(programs(layout), _SLOW_STEPS, injected.wrong, STEP, random.Random(choice.random()))
    machine.run()
    return machine.now


def judge(chosen: Chosen, expected: dict[int, str], found: Diagnosis) -> Case:
    """Return whether a diagnosis is right; ``expected``: logical rank -> kind, of the ranks at fault."""
    named = tuple((cause.rank, cause.kind) for cause in found.causes)
    first = named[: len(expected)]
    # of two ranks at fault, one may delay nobody because of the other
    waited_for = {rank for wait in found.waiting for rank in wait.on}
    due = {rank: kind for rank, kind in expected.items() if len(expected) == 1 or rank in waited_for}
    rank_is_right = {rank for rank, _ in first} & due.keys() == due.keys()
    return Case(
        *(chosen.seed, chosen.layout, chosen.fault, expected, named),
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


# --- command ----------------------------------------------------------------------------------------------------------

_MOST_MISSES = 40


def add_parser(simulations) -> None:
    """Add the subcommand ``hangs`` to the subparsers."""
    parser = simulations.add_parser(
        "hangs",
        help="whether ft diagnose hang names the cause of injected hangs and slow-downs",
        description="Injects hangs and slow-downs into simulated steps of Megatron in 14 layouts of 4 to 64 ranks, one "
        "in each case, and counts how often the code of ft diagnose hang names the rank at fault and the kind.",
    )
    parser.add_argument(
        "--cases", type=quantities.count(1, 10**6), default=200, metavar="N", help="number of cases (default: 200)"
    )
    parser.add_argument(
        "--seed", type=quantities.count(0), default=0, metavar="N", help="seed of the first case (default: 0)"
    )
    parser.add_argument(
        "--jobs", type=quantities.count(1, 4096), default=1, metavar="N", help="number of processes (default: 1)"
    )
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Run the cases and print the numbers.

    Returns:
        0 if the rank is named in at least 98 % of the cases and the kind in at least 95 %, else 1.
    """
    found = count(_cases(given.cases, given.seed, given.jobs))
    print(as_text(found))
    return 0 if found["all"].ranks >= 0.98 * given.cases and found["all"].kinds >= 0.95 * given.cases else 1


def _cases(number: int, seed: int, jobs: int) -> list[Case]:
    """Return the first ``number`` cases from a seed on; seeds without a case are left out."""
    found: list[Case] = []
    with ProcessPoolExecutor(jobs) as pool:
        while len(found) < number:
            seeds = range(seed, seed + 2 * (number - len(found)))
            seed = seeds.stop
            found += [one for one in pool.map(case, seeds, chunksize=8) if one is not None]
    return found[:number]


def as_text(found: dict[str, Tally]) -> str:
    """Return a table of the numbers by fault, and the misses."""
    rows = [
        (fault, str(t.cases), f"{t.ranks / t.cases:.1%}", f"{t.kinds / t.cases:.1%}", str(t.innocents))
        for fault, t in sorted(found.items(), key=lambda item: (item[0] == "all", item[0]))
    ]
    lines = [table(("fault", "cases", "rank named", "kind named", "innocents"), rows, right=(1, 2, 3, 4))]
    misses = found["all"].misses
    if misses:
        lines += ["", "missed:", *(_miss(one) for one in misses[:_MOST_MISSES])]
    if len(misses) > _MOST_MISSES:
        lines.append(f"and {len(misses) - _MOST_MISSES} more")
    return "\n".join(lines)


def _miss(one: Case) -> str:
    said = ", ".join(f"rank {rank}: {kind}" for rank, kind in one.found[:3]) or "nothing"
    wanted = ", ".join(f"rank {rank}: {kind}" for rank, kind in one.expected.items())
    return f"  seed {one.seed}, {one.layout}, {one.fault}: {said}; injected was {wanted}"
