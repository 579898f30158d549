"""Campaigns of simulated runs: thousands of histories, each drawn from a seed, in several processes.

A campaign sums up the histories and the violated properties. For mutation testing, it injects known bugs ("mutants")
into the production code and checks that the histories expose them.
"""

import argparse
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any
from unittest import mock

from ft.base.errors import UserError
from ft.job.control import controller
from tests.simulation.engine import History, Kind, Options, World, play

_CHUNK, _PROGRESS_S = 50, 10.0
"""Number of seeds that a process simulates at a time; seconds between two progress messages."""


@dataclass(frozen=True)
class Mutant:
    """A bug: the function ``owner.name`` is replaced by ``wrong(original function)``.

    Attributes:
        title: name of the bug for the user.
        owner: module or class of the function.
        name: name of the function.
        wrong: takes the right function and returns the wrong one.
    """

    title: str
    owner: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]


def planter(mutants: list[Mutant]) -> Callable[[str, Any, str], Callable]:
    """Return a decorator for wrong functions, which get the right one before their own arguments and are entered into
    ``mutants``: ``@plant(title, owner, name of the right function)``.
    """

    def plant(title: str, owner: Any, name: str) -> Callable:
        def enter(wrong: Callable[..., Any]) -> Callable[..., Any]:
            mutants.append(Mutant(title, owner, name, lambda right: lambda *given, **how: wrong(right, *given, **how)))
            return wrong

        return enter

    return plant


@dataclass
class Summary:
    """Totals over histories.

    Attributes:
        histories: number of histories.
        outcomes: number of histories by outcome.
        struck: number of faults by what ``History.struck`` says of them.
        virtual_s: sum of the durations, in virtual seconds.
        counts: sum of ``History.counts``.
        messages: sum of ``History.messages``.
        pauses: kind of fault, or "none" -> for each history, the longest time without progress that it caused.
        failed: seed -> violation.
    """

    histories: int = 0
    outcomes: Counter = field(default_factory=Counter)
    struck: Counter = field(default_factory=Counter)
    virtual_s: float = 0.0
    counts: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)
    pauses: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def add(self, history: History) -> None:
        """Add one history to the totals."""
        self.histories += 1
        self.outcomes[history.outcome] += 1
        self.struck.update(history.struck)
        self.virtual_s += history.seconds
        self.counts.update(history.counts)
        self.messages.update(history.messages)
        for cause, pause in history.pauses.items():
            self.pauses.setdefault(cause, []).append(pause)
        if history.violation:
            self.failed[history.seed] = history.violation


@dataclass(frozen=True)
class Simulation:
    """What a campaign has to know of one simulation.

    Attributes:
        name: name of its subcommand.
        about: description for ``--help``.
        faults: the kinds of faults that it injects.
        most: default of ``--faults``, the maximum number of faults in one history.
        world: function (seed, options, event log or None) -> the world to play, as a context manager.
        mutants: the bugs that it has to find.
        report: function that returns the lines of the report between the first line and the violations.
        columns: (width of the column of mutant titles, greatest length of a violation in the table), in characters.
        ranks: least and greatest value of ``--ranks``, None if there is no such flag.
    """

    name: str
    about: str
    faults: Sequence[Kind]
    most: int
    world: Callable[[int, Options, list[str] | None], AbstractContextManager[World]]
    mutants: Sequence[Mutant]
    report: Callable[[Summary], list[str]]
    columns: tuple[int, int]
    ranks: tuple[int, int] | None = None

    def play(self, seed: int, options: Options | None = None, with_lines: bool = False) -> History:
        """Play the history of ``seed``, with its event log or without. The same arguments give the same history."""
        history = History(seed)
        lines = history.lines if with_lines else None
        with self.world(seed, options or Options(self.most), lines) as world:
            return play(history, world)

    def find(self, title: str) -> list[Mutant]:
        """Return the mutant with this title, or all of them for "all".

        Raises:
            UserError: no mutant has this title.
        """
        found = [mutant for mutant in self.mutants if title in ("all", mutant.title)]
        if not found:
            titles = "".join(f"\n    {mutant.title}" for mutant in self.mutants)
            raise UserError(f"no bug is called {title!r}", f"give all, or one of{titles}")
        return found


def named(name: str) -> Simulation:
    """Return the simulation with this name."""
    return importlib.import_module(f"tests.simulation.{name}.run").SIMULATION


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[None]:
    """Inject the bug into the production code for the duration of the context, also into the controller's table of
    handlers; None injects nothing.
    """
    if mutant is None:
        yield
        return
    right = getattr(mutant.owner, mutant.name)
    wrong = mutant.wrong(right)
    handlers = {kind: wrong for kind, handler in controller._HANDLERS.items() if handler is right}
    with mock.patch.object(mutant.owner, mutant.name, wrong), mock.patch.dict(controller._HANDLERS, handlers):
        yield


# --- the command ------------------------------------------------------------------------------------------------------


def add_parser(simulations, simulation: Simulation) -> None:
    """Add the subcommand of a simulation to the subparsers."""
    parser = simulations.add_parser(simulation.name, help=simulation.about, description=simulation.about)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=1000, metavar="N", help="N histories (default: 1000)")
    which.add_argument("--seed", type=int, metavar="N", help="simulate one history and print its event log")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first seed (default: 0)")
    parser.add_argument(
        "--faults",
        type=int,
        default=simulation.most,
        metavar="N",
        help=f"maximum number of faults in a history (default: {simulation.most})",
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
    if simulation.ranks:
        parser.add_argument("--ranks", type=int, metavar="N", help="logical ranks of every run (default: drawn)")
    parser.set_defaults(main=lambda given: run(simulation, given))


def run(simulation: Simulation, given: argparse.Namespace) -> int:
    """Simulate what the flags ask for, and print the result.

    Returns:
        The exit status: 1 if a history violates a property, or if an injected bug is not found, otherwise 0.

    Raises:
        UserError: an argument is out of range, a kind or a bug is unknown, or several bugs are requested for one seed.
    """
    options, jobs = _options(simulation, given), given.jobs or os.cpu_count() or 1
    if given.seed is not None:
        mutants = simulation.find(given.plant) if given.plant else [None]
        if len(mutants) > 1:
            raise UserError("a single seed cannot be simulated with all bugs", "name one bug, or give --seeds")
        with planted(mutants[0]):
            history = simulation.play(given.seed, options, with_lines=True)
        print(_of_failure(simulation, history) if history.violation else "\n".join(history.lines))
        return 1 if history.violation else 0
    seeds = range(given.first, given.first + given.seeds)
    if given.plant:
        return _search(simulation, seeds, options, jobs, simulation.find(given.plant))
    return _sum_up(simulation, seeds, options, jobs)


def _options(simulation: Simulation, given: argparse.Namespace) -> Options:
    kinds, known = tuple(given.kinds.split(",")) if given.kinds else None, [kind.name for kind in simulation.faults]
    if unknown := [name for name in kinds or () if name not in known]:
        raise UserError(f"there is no kind of fault {unknown[0]!r}", f"there are: {', '.join(known)}")
    for name, least, most in (("seeds", 1, 10**9), ("faults", 0, 10**6), ("jobs", 0, 4096)):
        if not least <= getattr(given, name) <= most:
            raise UserError(f"--{name} {getattr(given, name)}", f"give a number from {least} to {most}")
    ranks = given.ranks if simulation.ranks else None
    if ranks is not None and not simulation.ranks[0] <= ranks <= simulation.ranks[1]:
        raise UserError(f"--ranks {ranks}", f"give {simulation.ranks[0]} to {simulation.ranks[1]}")
    return Options(given.faults, kinds, ranks)


def _sum_up(simulation: Simulation, seeds: range, options: Options, jobs: int) -> int:
    summary, began, said = Summary(), time.monotonic(), time.monotonic()
    for history in histories(simulation, seeds, options, jobs):
        summary.add(history)
        if time.monotonic() > said + _PROGRESS_S:
            said = time.monotonic()
            sys.stderr.write(f"{summary.histories} of {len(seeds)}, {len(summary.failed)} violations\n")
    print(_of_summary(simulation, summary, time.monotonic() - began))
    if summary.failed:
        first = min(summary.failed)
        print(f"\nthe history of seed {first}\n")
        print(_of_failure(simulation, simulation.play(first, options, with_lines=True)))
    return 1 if summary.failed else 0


def _search(simulation: Simulation, seeds: range, options: Options, jobs: int, mutants: list[Mutant]) -> int:
    width, most = simulation.columns
    print(f"{'found by seed':>14s}  {'planted bug':{width}s}  given away by")
    missed = 0
    for mutant in mutants:
        found = next((one for one in histories(simulation, seeds, options, jobs, mutant) if one.violation), None)
        missed += found is None
        said = f"not found in {len(seeds)} seeds" if found is None else found.violation.splitlines()[0][:most]
        print(f"{'-' if found is None else found.seed:>14}  {mutant.title:{width}s}  {said}", flush=True)
    return 1 if missed else 0


def histories(
    simulation: Simulation, seeds: range, options: Options, jobs: int, mutant: Mutant | None = None
) -> Iterator[History]:
    """Yield histories in the order of the seeds, regardless of the number of processes; with a mutant, a process stops
    at its first violation.
    """
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    title = None if mutant is None else mutant.title
    if jobs == 1 or len(chunks) == 1:
        for chunk in chunks:
            yield from _play(simulation.name, chunk, options, title)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for found in pool.map(_play, repeat(simulation.name), chunks, repeat(options), repeat(title)):
                yield from found
        finally:
            pool.shutdown(cancel_futures=True)


def _play(name: str, seeds: range, options: Options, title: str | None) -> list[History]:
    """Play a chunk of seeds, in a worker process if there are several: it is given names, which can be pickled."""
    simulation = named(name)
    mutant, found = simulation.find(title)[0] if title is not None else None, []
    with planted(mutant):
        for seed in seeds:
            found.append(simulation.play(seed, options))
            if mutant is not None and found[-1].violation:
                break
    return found


def _of_summary(simulation: Simulation, summary: Summary, took_s: float) -> str:
    """Return the totals as text; ``took_s`` is the elapsed real time in seconds."""
    lines = [
        f"{summary.histories} histories in {took_s:.1f} s: {summary.histories / max(took_s, 1e-9):.0f} seeds/s, "
        f"{summary.virtual_s / 3600:.1f} h of virtual time",
        *simulation.report(summary),
        "",
        f"violations: {len(summary.failed)}",
        *(f"    seed {seed}: {text.splitlines()[0]}" for seed, text in sorted(summary.failed.items())[:20]),
    ]
    return "\n".join(lines)


def _of_failure(simulation: Simulation, history: History) -> str:
    """Return the event log of a failed history, with its violation and the command that reproduces it."""
    again = f"again, alone: python -m tests.simulation {simulation.name} --seed {history.seed}"
    return "\n".join([*history.lines, "", f"seed {history.seed} violates: {history.violation}", again])
