"""Flags and JSON output that the subcommands of ``ft plan spare`` share.

In SPARe each part (shard type) of a step's data is hosted by several of N groups of ranks; the redundancy is the number
of hosts of each shard type.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from ft.base.quantities import several


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add ``--groups``, ``--redundancy`` and ``--json``."""
    parser.add_argument(
        "--groups",
        type=several,
        required=True,
        metavar="N",
        help="number of groups, which is also the number of shard types",
    )
    parser.add_argument(
        "--redundancy", type=several, required=True, metavar="R", help="number of hosts of each shard type"
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of a table: one object, or a list of objects"
    )


def sizes(given: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (number of groups, redundancy) for every pair of values that the flags ask for."""
    return list(product(given.groups, given.redundancy))


def as_json(given: argparse.Namespace, answers: Sequence[dict[str, Any]]) -> str:
    """Return the answers as JSON text: an object for a single pair of sizes, else a list in the order of ``sizes``."""
    return json.dumps(answers[0] if len(sizes(given)) == 1 else list(answers))
