"""Implement ``ft plan spare simulate``: simulate a training job under failures, step by step.

The simulation compares SPARe (each group of ranks can compute the data shards of lost groups), replication, and
checkpoints alone.
"""

import argparse
import json

from ft.base.errors import UserError
from ft.base.quantities import several
from ft.lab.simulate import fields
from ft.lab.simulate.spare.scenario import FIELDS, Scenario, read_file, read_flags, scenario
from ft.lab.simulate.spare.study import study
from ft.lab.simulate.spare.table import LEFT_OUT, as_text, as_values

_DESCRIPTION = """\
Simulate training step by step under failures, with SPARe, replication, or checkpoints alone.
The scenario is a file, or flags, or both; flags override the file. Times have a unit (ms, s, m
or min, h, d); groups and redundancies are numbers, lists and ranges: 9, 2..12, 2..4,8."""
_TITLES = {
    "job": "what is trained",
    "failures": "failures of groups",
    "costs": "what events cost",
    "schemes": "what is compared",
    "run": "runs",
}


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate the time to train with SPARe, replication and checkpoints alone",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="FILE", help="scenario file (TOML), such as those in examples/")
    add_flags(parser, FIELDS)
    parser.add_argument(
        "--json", action="store_true", help="print JSON: an object, or a list of objects for several cases"
    )
    parser.set_defaults(main=run)


def add_flags(parser: argparse.ArgumentParser, names) -> None:
    """Add one flag for each of ``names`` (keys of :data:`FIELDS`), grouped by the sections of a scenario file."""
    fields.add_flags(parser, {name: FIELDS[name] for name in names}, _TITLES)


def asked_for(given: argparse.Namespace, names, file: str | None = None) -> list[Scenario]:
    """Return one scenario for each number of groups in ``--groups``.

    Args:
        given: the parsed command line.
        names: names of the flags to use. A flag takes precedence over the file.
        file: path of a scenario file, or None.

    Raises:
        UserError: a scenario is invalid.
    """
    values = read_file(file) if file is not None else {}
    flags = {name: getattr(given, name.replace("-", "_")) for name in names}
    several = [None] if flags["groups"] is None else map(str, _groups(flags["groups"]))
    return [scenario({**values, **read_flags({**flags, "groups": each})}) for each in several]


def _groups(text: str) -> list[int]:
    try:
        return several(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--groups {text}: {error}", "give a number of groups, or several: 200,600,1000") from error


def run(arguments: argparse.Namespace) -> int:
    """Simulate every scenario and print the results.

    Raises:
        UserError: a scenario is invalid, or there is no placement of shards on the groups with a given redundancy.
    """
    found = [(asked, list(study(asked))) for asked in asked_for(arguments, FIELDS, arguments.scenario)]
    if arguments.json:
        values = [as_values(asked, row) for asked, rows in found for row in rows]
        print(json.dumps(values[0] if len(values) == 1 else values))
    else:
        print("\n\n".join([LEFT_OUT, *(as_text(asked, rows) for asked, rows in found)]))
    return 0
