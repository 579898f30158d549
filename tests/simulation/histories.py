"""Driver of the randomized simulations of ``ft simulate``: thousands of runs, each drawn from a seed, in several
processes.

A history is one simulated run. The driver summarizes the runs and the violated properties. For mutation testing, it
injects known bugs ("mutants") and checks that the runs expose them. Each simulation defines how a history is played and
how a bug is injected (:class:`Simulation`).
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
from tests.simulation.mutation import Replaced

_CHUNK, _PROGRESS_S = 50, 10.0
"""Number of seeds that a process simulates at a time; seconds between two progress messages."""


class History(Protocol):
    """The result of one simulated run.

    Attributes:
        seed: seed from which the run was drawn.
        violation: the first property that was violated, "" if none was.
        lines: event log, empty unless requested.
    """

    seed: int
    violation: str
    lines: list[str]


class Summary(Protocol):
    """Totals over many simulated runs.

    Attributes:
        histories: number of runs that were added.
        failed: seed -> violation.
    """

    histories: int
    failed: dict[int, str]

    def add(self, history: Any) -> None:
        """Add one run to the totals."""

    def text(self, took_s: float) -> str:
        """Return the totals as text.

        Args:
            took_s: elapsed real time in seconds.
        """


@dataclass(frozen=True)
class Simulation:
    """The properties and functions of one simulation that :func:`run` needs.

    Attributes:
        name: name of the simulation's subcommand.
        kinds: names of the kinds of faults that the simulation injects.
        play: function (seed, simulation-specific options, mutant or None, whether to keep the event log) -> history. It
            must be defined at module level, because worker processes call it.
        find: function that returns the mutants with a given title, or all mutants for "all"; raises UserError if there
            is none.
        summary: function that creates an empty summary.
        columns: (width of the column of mutant titles, greatest length of a violation in the table), in characters.
    """

    name: str
    kinds: Collection[str]
    play: Callable[[int, Any, Replaced | None, bool], History]
    find: Callable[[str], list[Replaced]]
    summary: Callable[[], Summary]
    columns: tuple[int, int]


def add_arguments(parser: argparse.ArgumentParser, faults: int) -> None:
    """Add the flags that all randomized simulations share.

    Args:
        parser: the parser to extend.
        faults: default of ``--faults``, the maximum number of faults in one run.
    """
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=1000, metavar="N", help="N histories (default: 1000)")
    which.add_argument("--seed", type=int, metavar="N", help="simulate one history and print its event log")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first seed (default: 0)")
    parser.add_argument(
        "--faults",
        type=int,
        default=faults,
        metavar="N",
        help=f"maximum number of faults in a history (default: {faults})",
    )
    parser.add_argument("--kinds", metavar="NAME,...", help="inject only these kinds of faults")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="number of processes; 0: one for each core (default: 1)"
    )
    parser.add_argument(
        "--plant",
        metavar="BUG",
        help="inject a known bug, which the simulation has to find; all: one bug after the other",
    )


def check_arguments(simulation: Simulation, arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """Validate the flags of :func:`add_arguments`, and return the selected kinds of faults, None for all.

    Raises:
        UserError: an argument is out of range, or a kind is unknown.
    """
    kinds = tuple(arguments.kinds.split(",")) if arguments.kinds else None
    if unknown := [name for name in kinds or () if name not in simulation.kinds]:
        raise UserError(f"there is no kind of fault {unknown[0]!r}", f"there are: {', '.join(simulation.kinds)}")
    for name, least, most in (("seeds", 1, 10**9), ("faults", 0, 10**6), ("jobs", 0, 4096)):
        if not least <= getattr(arguments, name) <= most:
            raise UserError(f"--{name} {getattr(arguments, name)}", f"give a number from {least} to {most}")
    return kinds


def run(simulation: Simulation, arguments: argparse.Namespace, options: Any) -> int:
    """Simulate the requested runs and print the result.

    Args:
        simulation: the simulation to run.
        arguments: parsed flags of :func:`add_arguments`.
        options: simulation-specific options, passed on to ``play``.

    Returns:
        The exit status: 1 if a run violates a property, or if an injected bug is not found, otherwise 0.

    Raises:
        UserError: the bug is unknown, or several bugs are requested for a single seed.
    """
    jobs = arguments.jobs or os.cpu_count() or 1
    if arguments.seed is not None:
        plants = simulation.find(arguments.plant) if arguments.plant else [None]
        if len(plants) > 1:
            raise UserError("a single seed cannot be simulated with all bugs", "name one bug, or give --seeds")
        return _tell(simulation, arguments.seed, options, plants[0])
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.plant:
        return _search(simulation, seeds, options, jobs, simulation.find(arguments.plant))
    return _sum_up(simulation, seeds, options, jobs)


def _tell(simulation: Simulation, seed: int, options: Any, plant: Replaced | None) -> int:
    history = simulation.play(seed, options, plant, True)
    print(_of_failure(simulation, history) if history.violation else "\n".join(history.lines))
    return 1 if history.violation else 0


def _sum_up(simulation: Simulation, seeds: range, options: Any, jobs: int) -> int:
    summary, began, said = simulation.summary(), time.monotonic(), time.monotonic()
    for history in _histories(simulation, seeds, options, jobs, None):
        summary.add(history)
        if time.monotonic() > said + _PROGRESS_S:
            said = time.monotonic()
            sys.stderr.write(f"{summary.histories} of {len(seeds)}, {len(summary.failed)} violations\n")
    print(summary.text(time.monotonic() - began))
    if summary.failed:
        print(f"\nthe history of seed {min(summary.failed)}\n")
        print(_of_failure(simulation, simulation.play(min(summary.failed), options, None, True)))
    return 1 if summary.failed else 0


def _search(simulation: Simulation, seeds: range, options: Any, jobs: int, plants: list[Replaced]) -> int:
    found = []
    for plant in plants:
        histories = _histories(simulation, seeds, options, jobs, plant.title)
        given_away = next((history for history in histories if history.violation), None)
        histories.close()
        found.append((plant.title, len(seeds), given_away))
    print(_of_plants(found, *simulation.columns))
    return 0 if all(history is not None for _, _, history in found) else 1


def _histories(simulation: Simulation, seeds: range, options: Any, jobs: int, title: str | None) -> Iterator[History]:
    """Yield histories in the order of the seeds, regardless of the number of processes."""
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    if jobs == 1 or len(chunks) == 1:
        for chunk in chunks:
            yield from _play(simulation, chunk, options, title)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for histories in pool.map(_play, repeat(simulation), chunks, repeat(options), repeat(title)):
                yield from histories
        finally:
            pool.shutdown(cancel_futures=True)


def _play(simulation: Simulation, seeds: range, options: Any, title: str | None) -> list[History]:
    """Simulate a chunk of seeds, and return the results. Runs in a worker process if there are several.

    Args:
        simulation: the simulation to run.
        seeds: seeds of the chunk.
        options: simulation-specific options.
        title: title of the mutant to inject; the simulation then stops at the first violation. None: no mutant.
    """
    plant = simulation.find(title)[0] if title is not None else None
    found = []
    for seed in seeds:
        found.append(simulation.play(seed, options, plant, False))
        if title is not None and found[-1].violation:
            break
    return found


def _of_failure(simulation: Simulation, history: History) -> str:
    """Return the event log of a failed history, with its violation and the command that reproduces it."""
    again = f"again, alone: python -m tests.simulation {simulation.name} --seed {history.seed}"
    return "\n".join([*history.lines, "", f"seed {history.seed} violates: {history.violation}", again])


def _of_plants(found: Iterable[tuple[str, int, History | None]], width: int, most: int) -> str:
    """Return a table of (bug, number of seeds tried, the history that exposed it or None)."""
    lines = [f"{'found by seed':>14s}  {'planted bug':{width}s}  given away by"]
    for title, tried, history in found:
        if history is None:
            lines.append(f"{'-':>14s}  {title:{width}s}  not found in {tried} seeds")
        else:
            lines.append(f"{history.seed:14d}  {title:{width}s}  {history.violation.splitlines()[0][:most]}")
    return "\n".join(lines)
