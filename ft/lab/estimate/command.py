"""Implement ``ft dmr estimate``: predict the cost of executing each operator twice (DMR), without any hardware."""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.lab.estimate.answer import cluster_of, estimate
from ft.lab.estimate.profile import profile
from ft.lab.estimate.scenario import FIELDS, question, read_file, read_flags
from ft.lab.estimate.text import as_text, as_values
from ft.systems.dmr.plan.file import write_trace

_DESCRIPTION = """\
Estimate what DMR will cost on a cluster that need not exist. The iteration is computed from published model shapes,
data sheets and assumed efficiencies, and planned by the planner of real runs. Overheads are shares of an iteration
without DMR. A scenario file (examples/dmr) has a key for each flag; flags override the file."""


def add_parser(subparsers, name: str = "estimate") -> None:
    """Add the subcommand: ``ft dmr estimate``, and under another name ``ft plan dmr``."""
    parser = subparsers.add_parser(
        name,
        help="estimate what DMR will cost a model on a cluster, without hardware",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a TOML file")
    for name, field in FIELDS.items():
        parser.add_argument(f"--{name}", metavar=field.metavar, help=field.help.replace("%", "%%"))
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the computed profile to this file, for ft dmr plan; needs a single batch size",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate.

    Raises:
        UserError: the scenario is inconsistent, or training without DMR does not fit the memory budget.
    """
    values = read_file(arguments.scenario) if arguments.scenario else {}
    given = read_flags({name: getattr(arguments, name.replace("-", "_")) for name in FIELDS})
    for one, other in (("idle", "naive-overhead"), ("naive-overhead", "idle")):
        if one in given and other not in given:
            values.pop(other, None)
    asked = question(values | given)
    if arguments.out and len(asked.layouts) > 1:
        raise UserError(
            "a profile needs a single batch size, and there are several", "give one --batch, or remove --out"
        )
    cluster = cluster_of(asked)
    found = [estimate(asked, layout, cluster) for layout in asked.layouts]
    if arguments.out:
        write_trace(Path(arguments.out), profile(asked.model, asked.layouts[0], cluster, asked.budget))
    print(json.dumps(as_values(asked, cluster, found)) if arguments.json else as_text(asked, cluster, found))
    return 0
