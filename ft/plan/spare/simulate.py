"""``ft plan spare simulate``."""

import argparse
import json

from ft.simulate.spare.scenario import FIELDS, Scenario, read_file, read_flags, scenario
from ft.simulate.spare.study import study
from ft.simulate.spare.table import as_text, as_values

_DESCRIPTION = """\
Trains step by step under failures, as a simulation: SPARe, replication, or checkpoints alone.
The question is a scenario file, or flags, or both: flags count more. Times are seconds, or a number with ms, s, m, h
or d; redundancies are numbers, lists and ranges: 9, 2..12, 2..4,8."""
_TITLES = {
    "job": "what is trained",
    "failures": "failures of groups",
    "costs": "what events cost",
    "schemes": "what is compared",
    "run": "runs",
}


def add_parser(questions) -> None:
    """Adds the subcommand."""
    parser = questions.add_parser(
        "simulate",
        help="time-to-train of SPARe, replication and checkpoints alone, step by step",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "scenario", nargs="?", metavar="FILE", help="a scenario file (TOML), such as those in examples/"
    )
    add_flags(parser, FIELDS)
    parser.add_argument("--json", action="store_true", help="JSON: an object, or a list of them for several cases")
    parser.set_defaults(main=run)


def add_flags(parser: argparse.ArgumentParser, names) -> None:
    """Adds the flags of these :data:`FIELDS`, in groups by the sections of a scenario file."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name in names:
        field = FIELDS[name]
        if field.section not in groups:
            groups[field.section] = parser.add_argument_group(_TITLES[field.section])
        # Read later, together with the file: one place says what is wrong with a value.
        groups[field.section].add_argument(f"--{name}", metavar=field.metavar, help=field.about.replace("%", "%%"))


def asked_for(given: argparse.Namespace, names, file: str | None = None) -> Scenario:
    """The scenario of a file, where there is one, and of the flags ``names``.

    Raises:
        UserError: one of them does not make sense.
    """
    flags = read_flags({name: getattr(given, name.replace("-", "_")) for name in names})
    return scenario({**(read_file(file) if file is not None else {}), **flags})


def run(arguments: argparse.Namespace) -> int:
    """Prints what became of every case.

    Raises:
        UserError: the scenario makes no sense, or a redundancy cannot be placed.
    """
    asked = asked_for(arguments, FIELDS, arguments.scenario)
    rows = list(study(asked))
    if arguments.json:
        values = [as_values(asked, row) for row in rows]
        print(json.dumps(values[0] if len(values) == 1 else values))
    else:
        print(as_text(asked, rows))
    return 0
