"""Flags and JSON output shared by the subcommands of ``ft plan spare``."""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from ft.base.quantities import several


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add ``--groups``, ``--redundancy`` and ``--json``."""
    parser.add_argument("--groups", type=several, required=True, metavar="N", help="of groups, and of shard types")
    parser.add_argument("--redundancy", type=several, required=True, metavar="R", help="hosts of each type")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table: one object, or a list of them")


def sizes(given: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (groups, redundancy) of every answer that is asked for."""
    return list(product(given.groups, given.redundancy))


def as_json(given: argparse.Namespace, answers: Sequence[dict[str, Any]]) -> str:
    """Return a JSON object if one size was asked for, else a list with an object for each; redundancy varies fastest.
    """
    return json.dumps(answers[0] if len(sizes(given)) == 1 else list(answers))
