"""Implement ``ft plan spare cross-check``: compare the step-level simulation with a SimGrid model of the same scenario.

Both simulate training under failures with SPARe (survivors compute the data shards of lost groups), with replication,
or with checkpoints alone.
"""

import argparse
import json
from dataclasses import asdict

from ft.lab.plan.spare.simulate import add_flags, asked_for
from ft.lab.simulate.spare.cross_check import TOLERANCE, Comparison, compare
from ft.lab.simulate.spare.scenario import FIELDS
from ft.lab.simulate.spare.table import LEFT_OUT
from ft.show.text import seconds, table

_DESCRIPTION = """\
Compare the step-level simulation with an independent model of the same scenario in SimGrid, with the same failures and
without jitter. The exit code is 1 if they do not agree. Needs SimGrid (the extra [simgrid]) and a small scenario."""
_NAMES = tuple(name for name in FIELDS if name not in ("jitter", "jitter-per"))
_HEAD = ("N", "scheme", "R", "seed", "step level", "SimGrid", "restarts", "failures", "patches", "stacks", "agree")


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "cross-check",
        help="compare the simulation of a small scenario with SimGrid",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="FILE", help="a scenario file (TOML)")
    add_flags(parser, _NAMES)
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each case and seed")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print both results; return 1 if they differ.

    Raises:
        UserError: SimGrid is not installed, or the scenario is invalid or too large.
    """
    found = [one for asked in asked_for(arguments, _NAMES, arguments.scenario) for one in compare(asked)]
    if arguments.json:
        print(json.dumps([_values(one) for one in found]))
    else:
        print(f"{LEFT_OUT}\n")
        print(table(_HEAD, [_cells(one) for one in found], right=(0, *range(2, 10))))
        print(
            f"\nagree: the same events, and times within {TOLERANCE:g} of each other; two figures: step level, SimGrid"
        )
    return 0 if all(one.agrees for one in found) else 1


def _values(one: Comparison) -> dict:
    return {**asdict(one), "difference": one.difference, "agrees": one.agrees}


def _cells(one: Comparison) -> list[str]:
    ours, theirs = one.step_level, one.simgrid
    both = [
        str(mine) if (mine := getattr(ours, name)) == (other := getattr(theirs, name)) else f"{mine}, {other}"
        for name in ("restarts", "failures", "patches", "stacks")
    ]
    times = [seconds(ours.total_s), seconds(theirs.total_s)]
    return [
        str(one.groups),
        one.scheme,
        str(one.redundancy),
        str(one.seed),
        *times,
        *both,
        "yes" if one.agrees else "NO",
    ]
