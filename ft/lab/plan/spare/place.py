"""Implement ``ft plan spare place``: compute which group of ranks hosts which parts (shard types) of a step's data.

SPARe places N shard types on N groups by a ruler, a list of r marks: group w hosts type (w + mark) mod N for each mark.
"""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.base.quantities import several
from ft.lab.plan.spare.flags import add_sizes, as_json, sizes
from ft.show.text import left_out, table
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import check, largest_redundancy, ruler

_DESCRIPTION = """\
Compute a ruler with which two types share at most one group: group w hosts type (w + mark) mod N for each mark. The
ruler is the optimal Golomb ruler if it fits, else a modular ruler for exactly this number of groups."""


LEFT_OUT = left_out("failure domains: the hosts of a type may share a rack or a switch")


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "place",
        help="compute the ruler that places the types, and the resulting layout",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sizes(parser)
    parser.add_argument("--ruler", type=several, metavar="0,A,B,...", help="use these marks, after a check")
    parser.add_argument("--out", metavar="FILE", help="write the initial order of every group to this file, as JSON")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the rulers and, with ``--out``, write the layout (the types of every group in their initial order).

    Raises:
        UserError: a size cannot be placed, the given ruler is invalid, or the file cannot be written.
    """
    if given.out is not None and len(sizes(given)) > 1:
        raise UserError(
            "--out stores a single layout, and several sizes are given", "give one --groups and --redundancy"
        )
    placements = [_placement(groups, redundancy, given.ruler) for groups, redundancy in sizes(given)]
    if given.out is not None:
        _write(placements[0], Path(given.out))
    answers = [{"ruler": list(placement.ruler), "max_overlap": placement.max_overlap} for placement in placements]
    print(as_json(given, answers) if given.json else f"{LEFT_OUT}\n\n{_as_text(placements)}")
    return 0


def _placement(groups: int, redundancy: int, given: list[int] | None) -> Placement:
    if given is None:
        return Placement(groups, ruler(groups, redundancy))
    if len(given) != redundancy:
        raise UserError(
            f"the ruler has {len(given)} marks, and the redundancy is {redundancy}", "give one mark for each host"
        )
    return Placement(groups, check(given, groups))


def _write(placement: Placement, path: Path) -> None:
    layout = {
        "groups": placement.groups,
        "redundancy": placement.redundancy,
        "ruler": list(placement.ruler),
        "orders": placement.orders().tolist(),
    }
    try:
        path.write_text(json.dumps(layout) + "\n")
    except OSError as error:
        raise UserError(f"the layout cannot be written: {error}", "give --out a path that can be written") from error


def _as_text(placements: list[Placement]) -> str:
    head = ["groups", "redundancy", "at most", "overlap", "ruler"]
    rows = [
        [
            *(str(made.groups), str(made.redundancy), str(largest_redundancy(made.groups)), str(made.max_overlap)),
            " ".join(str(mark) for mark in made.ruler),
        ]
        for made in placements
    ]
    return table(head, rows, right=range(4))
