"""The ``python -m tests.simulation hangs`` subcommand: its arguments, and the table that it prints."""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from ft.base.errors import UserError
from ft.base.quantities import count
from ft.show.text import table

if TYPE_CHECKING:
    from tests.simulation.hangs.campaign import Case, Tally

_MOST_MISSES = 40


def add_parser(simulations) -> None:
    """Add the subcommand ``hangs``, with ``run`` as its function.

    Args:
        simulations: the subparsers of ``ft simulate``.
    """
    parser = simulations.add_parser(
        "hangs",
        help="whether ft diagnose hang names the cause of injected hangs and slow-downs",
        description="Injects hangs and slow-downs into simulated steps of Megatron in 14 layouts of 4 to 64 ranks, one "
        "in each case, and counts how often the code of ft diagnose hang names the rank at fault and the kind.",
    )
    parser.add_argument(
        "--cases", type=count(1, 10**6), default=200, metavar="N", help="number of cases (default: 200)"
    )
    parser.add_argument("--seed", type=count(0), default=0, metavar="N", help="seed of the first case (default: 0)")
    parser.add_argument("--jobs", type=count(1, 4096), default=1, metavar="N", help="number of processes (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Run the cases and print the numbers.

    Returns:
        0 if the rank is named in at least 98 % of the cases and the kind in at least 95 %, else 1.

    Raises:
        UserError: an argument is out of range.
    """
    if given.cases < 1 or given.jobs < 1:
        raise UserError("--cases and --jobs must be at least 1", "leave them out for the defaults")
    # Imported here, because it imports torch, for which the help of other commands must not wait.
    from tests.simulation.hangs.campaign import count

    found = count(_cases(given.cases, given.seed, given.jobs))
    print(json.dumps(_values(found)) if given.json else as_text(found))
    return 0 if found["all"].ranks >= 0.98 * given.cases and found["all"].kinds >= 0.95 * given.cases else 1


def _cases(number: int, seed: int, jobs: int) -> "list[Case]":
    """Return the first ``number`` cases from a seed on; seeds without a case are left out."""
    from tests.simulation.hangs.campaign import case

    found: list[Case] = []
    with ProcessPoolExecutor(jobs) as pool:
        while len(found) < number:
            seeds = range(seed, seed + 2 * (number - len(found)))
            seed = seeds.stop
            found += [one for one in pool.map(case, seeds, chunksize=8) if one is not None]
    return found[:number]


def _values(found: "dict[str, Tally]") -> dict[str, dict]:
    return {
        fault: {
            "cases": tally.cases,
            "rank_named": tally.ranks,
            "kind_named": tally.kinds,
            "innocents_named": tally.innocents,
            "missed_seeds": [miss.seed for miss in tally.misses],
        }
        for fault, tally in sorted(found.items())
    }


def as_text(found: "dict[str, Tally]") -> str:
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


def _miss(one: "Case") -> str:
    said = ", ".join(f"rank {rank}: {kind}" for rank, kind in one.found[:3]) or "nothing"
    wanted = ", ".join(f"rank {rank}: {kind}" for rank, kind in one.expected.items())
    return f"  seed {one.seed}, {one.layout}, {one.fault}: {said}; injected was {wanted}"
