"""Histories by the thousand, each from its seed: played in several processes, summed up, searched for planted bugs.

What is simulated, and how a bug is planted in it, is the business of each simulation (:class:`Simulation`).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from ft.base.errors import UserError

_CHUNK, _PROGRESS_S = 50, 10.0


class History(Protocol):
    """What came of a seed. ``violation``: "" if nothing is wrong; ``lines``: the history told, if asked for."""

    seed: int
    violation: str
    lines: list[str]


class Summary(Protocol):
    """Sums over histories. ``failed``: violations by seed."""

    histories: int
    failed: dict[int, str]

    def add(self, history: Any) -> None:
        """Counts one in."""

    def text(self, took_s: float) -> str:
        """``took_s``: real seconds."""


class Mutant(Protocol):
    """A bug that can be planted."""

    title: str


@dataclass(frozen=True)
class Simulation:
    """One of them.

    Attributes:
        name: of its subcommand. kinds: names of its faults.
        play: (seed, wish, plant or None, with lines) -> history; a function of a module, for other processes to call.
        find: the plants of that title, or all of them for "all"; raises UserError where there is none.
        summary: makes an empty one. columns: width of a plant's title, and of what gave it away.
    """

    name: str
    kinds: Collection[str]
    play: Callable[[int, Any, Mutant | None, bool], History]
    find: Callable[[str], list[Mutant]]
    summary: Callable[[], Summary]
    columns: tuple[int, int]


def add_arguments(parser: argparse.ArgumentParser, faults: int) -> None:
    """Adds the flags that all simulations have. ``faults``: at most so many in a history, unless told otherwise."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=1000, metavar="N", help="N histories (default: 1000)")
    which.add_argument("--seed", type=int, metavar="N", help="one history, told line by line")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of the seeds (default: 0)")
    parser.add_argument(
        "--faults", type=int, default=faults, metavar="N", help=f"at most N faults in a history (default: {faults})"
    )
    parser.add_argument("--kinds", metavar="NAME,...", help="only these kinds of faults")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes; 0: one for each core (default: 1)")
    parser.add_argument("--plant", metavar="BUG", help="plant a bug that has to be found; all: one after the other")


def check_arguments(simulation: Simulation, arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """The kinds of faults that were asked for, None: all.

    Raises:
        UserError: an argument is out of its range.
    """
    kinds = tuple(arguments.kinds.split(",")) if arguments.kinds else None
    if unknown := [name for name in kinds or () if name not in simulation.kinds]:
        raise UserError(f"no kind of fault is called {unknown[0]!r}", f"there are: {', '.join(simulation.kinds)}")
    for name, least in (("seeds", 1), ("faults", 0), ("jobs", 0)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name} {getattr(arguments, name)}", f"give {least} or more")
    return kinds


def run(simulation: Simulation, arguments: argparse.Namespace, wish: Any) -> int:
    """Prints what came of the histories; returns 1 if a property is violated, or if a planted bug is not found.

    Raises:
        UserError: no such bug, or several for one seed.
    """
    jobs = arguments.jobs or os.cpu_count() or 1
    if arguments.seed is not None:
        plants = simulation.find(arguments.plant) if arguments.plant else [None]
        if len(plants) > 1:
            raise UserError("one seed with all bugs, one after the other", "name one bug, or give --seeds")
        return _tell(simulation, arguments.seed, wish, plants[0])
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.plant:
        return _search(simulation, seeds, wish, jobs, simulation.find(arguments.plant))
    return _sum_up(simulation, seeds, wish, jobs)


def _tell(simulation: Simulation, seed: int, wish: Any, plant: Mutant | None) -> int:
    history = simulation.play(seed, wish, plant, True)
    print(_of_failure(simulation, history) if history.violation else "\n".join(history.lines))
    return 1 if history.violation else 0


def _sum_up(simulation: Simulation, seeds: range, wish: Any, jobs: int) -> int:
    summary, began, said = simulation.summary(), time.monotonic(), time.monotonic()
    for history in _histories(simulation, seeds, wish, jobs, None):
        summary.add(history)
        if time.monotonic() > said + _PROGRESS_S:
            said = time.monotonic()
            sys.stderr.write(f"{summary.histories} of {len(seeds)}, {len(summary.failed)} violations\n")
    print(summary.text(time.monotonic() - began))
    if summary.failed:
        print(f"\nthe history of seed {min(summary.failed)}\n")
        print(_of_failure(simulation, simulation.play(min(summary.failed), wish, None, True)))
    return 1 if summary.failed else 0


def _search(simulation: Simulation, seeds: range, wish: Any, jobs: int, plants: list[Mutant]) -> int:
    found = []
    for plant in plants:
        histories = _histories(simulation, seeds, wish, jobs, plant.title)
        given_away = next((history for history in histories if history.violation), None)
        histories.close()
        found.append((plant.title, len(seeds), given_away))
    print(_of_plants(found, *simulation.columns))
    return 0 if all(history is not None for _, _, history in found) else 1


def _histories(simulation: Simulation, seeds: range, wish: Any, jobs: int, title: str | None) -> Iterator[History]:
    """In the order of the seeds, whatever the number of processes."""
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    if jobs == 1 or len(chunks) == 1:
        for chunk in chunks:
            yield from _play(simulation, chunk, wish, title)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for histories in pool.map(_play, repeat(simulation), chunks, repeat(wish), repeat(title)):
                yield from histories
        finally:
            pool.shutdown(cancel_futures=True)


def _play(simulation: Simulation, seeds: range, wish: Any, title: str | None) -> list[History]:
    """In a process of its own: the bug is planted there. Ends with the first that fails, where one is looked for."""
    plant = simulation.find(title)[0] if title is not None else None
    found = []
    for seed in seeds:
        found.append(simulation.play(seed, wish, plant, False))
        if title is not None and found[-1].violation:
            break
    return found


def _of_failure(simulation: Simulation, history: History) -> str:
    """A history that went wrong, for whoever has to understand it."""
    again = f"again, alone: ft simulate {simulation.name} --seed {history.seed}"
    return "\n".join([*history.lines, "", f"seed {history.seed} violates: {history.violation}", again])


def _of_plants(found: Iterable[tuple[str, int, History | None]], width: int, most: int) -> str:
    """(bug, seeds tried, the history that gave it away or None) as a table."""
    lines = [f"{'found by seed':>14s}  {'planted bug':{width}s}  given away by"]
    for title, tried, history in found:
        if history is None:
            lines.append(f"{'-':>14s}  {title:{width}s}  not found in {tried} seeds")
        else:
            lines.append(f"{history.seed:14d}  {title:{width}s}  {history.violation.splitlines()[0][:most]}")
    return "\n".join(lines)
