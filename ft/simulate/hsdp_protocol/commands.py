"""``ft simulate hsdp-protocol``: FT-HSDP's protocol in simulated runs."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

from ft.errors import UserError
from ft.simulate.hsdp_protocol import report
from ft.simulate.hsdp_protocol.faults import BY_NAME
from ft.simulate.hsdp_protocol.plants import Plant, find, planted
from ft.simulate.hsdp_protocol.run import History, Wish, simulate

_CHUNK, _PROGRESS_S = 50, 10.0


def add_parser(simulations) -> None:
    """Adds ``hsdp-protocol``; ``main`` is a function of the parsed arguments that returns the exit code."""
    parser = simulations.add_parser(
        "hsdp-protocol",
        help="FT-HSDP's protocol under simulated faults",
        description="Plays histories of simulated replicas, each from its seed, with the quorum's production decision "
        "and client in them, and checks that healthy replicas are equal, that the line of steps that survives has "
        "every sample once, that at most the interrupted step is done again, and that nobody waits for ever.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seeds", type=int, default=1000, metavar="N", help="N histories (default: 1000)")
    which.add_argument("--seed", type=int, metavar="N", help="one history, told line by line")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of the seeds (default: 0)")
    parser.add_argument("--faults", type=int, default=8, metavar="N", help="at most N faults in a history (default: 8)")
    parser.add_argument("--kinds", metavar="NAME,...", help="only these kinds of faults")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes; 0: one for each core (default: 1)")
    parser.add_argument("--plant", metavar="BUG", help="plant a bug that has to be found; all: one after the other")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what came of the histories; returns 1 if a property is violated, or if a planted bug is not found.

    Raises:
        UserError: an argument is out of its range.
    """
    wish, jobs = _wish(arguments), arguments.jobs or os.cpu_count() or 1
    if arguments.seed is not None:
        plants = find(arguments.plant) if arguments.plant else [None]
        if len(plants) > 1:
            raise UserError("one seed with all bugs, one after the other", "name one bug, or give --seeds")
        return _tell(arguments.seed, wish, plants[0])
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.plant:
        return _plants(seeds, wish, jobs, find(arguments.plant))
    return _many(seeds, wish, jobs)


def _wish(arguments: argparse.Namespace) -> Wish:
    kinds = tuple(arguments.kinds.split(",")) if arguments.kinds else None
    if unknown := [name for name in kinds or () if name not in BY_NAME]:
        raise UserError(f"no kind of fault is called {unknown[0]!r}", f"there are: {', '.join(BY_NAME)}")
    for name, least in (("seeds", 1), ("faults", 0), ("jobs", 0)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name} {getattr(arguments, name)}", f"give {least} or more")
    return Wish(arguments.faults, kinds)


def _tell(seed: int, wish: Wish, plant: Plant | None) -> int:
    with planted(plant):
        history = simulate(seed, wish, plant.habits() if plant else None, with_lines=True)
    print(report.of_failure(history) if history.violation else "\n".join(history.lines))
    return 1 if history.violation else 0


def _many(seeds: range, wish: Wish, jobs: int) -> int:
    summary, began, said = report.Summary(), time.monotonic(), time.monotonic()
    for history in _histories(seeds, wish, jobs, None):
        summary.add(history)
        if time.monotonic() > said + _PROGRESS_S:
            said = time.monotonic()
            sys.stderr.write(f"{summary.histories} of {len(seeds)}, {len(summary.failed)} violations\n")
    print(summary.text(time.monotonic() - began))
    if summary.failed:
        print(f"\nthe history of seed {min(summary.failed)}\n")
        print(report.of_failure(simulate(min(summary.failed), wish, with_lines=True)))
    return 1 if summary.failed else 0


def _plants(seeds: range, wish: Wish, jobs: int, plants: list[Plant]) -> int:
    found = []
    for plant in plants:
        histories = _histories(seeds, wish, jobs, plant)
        given_away = next((history for history in histories if history.violation), None)
        histories.close()
        found.append((plant.title, len(seeds), given_away))
    print(report.of_plants(found))
    return 0 if all(history is not None for _, _, history in found) else 1


def _histories(seeds: range, wish: Wish, jobs: int, plant: Plant | None) -> Iterator[History]:
    """In the order of the seeds, whatever the number of processes."""
    chunks = [seeds[i : i + _CHUNK] for i in range(0, len(seeds), _CHUNK)]
    title = plant.title if plant is not None else None
    if jobs == 1 or len(chunks) == 1:
        for chunk in chunks:
            yield from _play(chunk, wish, title)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            for histories in pool.map(_play, chunks, repeat(wish), repeat(title)):
                yield from histories
        finally:
            pool.shutdown(cancel_futures=True)


def _play(seeds: range, wish: Wish, title: str | None) -> list[History]:
    """In a process of its own: the bug is planted there. Ends with the first that fails, where one is looked for."""
    plant = find(title)[0] if title is not None else None
    found = []
    with planted(plant):
        for seed in seeds:
            found.append(simulate(seed, wish, plant.habits() if plant else None))
            if title is not None and found[-1].violation:
                break
    return found
