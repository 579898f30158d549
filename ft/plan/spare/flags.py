"""Flags and answers that the subcommands of ``ft plan spare`` have in common."""

import argparse
import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

MOST = 10**6
"""The largest number in a range or list, and the longest of them."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds ``--groups``, ``--redundancy`` and ``--json``."""
    parser.add_argument("--groups", type=numbers, required=True, metavar="N", help="of groups, and of shard types")
    parser.add_argument("--redundancy", type=numbers, required=True, metavar="R", help="hosts of each type")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table: one object, or a list of them")


def sizes(given: argparse.Namespace) -> list[tuple[int, int]]:
    """(groups, redundancy) of every answer that is asked for."""
    return list(product(given.groups, given.redundancy))


def numbers(text: str) -> list[int]:
    """Whole numbers: "8", "2..12", "200,600", "2..4,8".

    Raises:
        argparse.ArgumentTypeError: it is none of these, or a range is empty.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d{1,9})\s*(?:\.\.\s*(-?\d{1,9})\s*)?", part)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a range like 2..12")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        if last < first:
            raise argparse.ArgumentTypeError(f"the range {part.strip()!r} is empty")
        if max(abs(first), abs(last)) > MOST:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} goes beyond {MOST:,}")
        found += range(first, last + 1)
    return found


def number(text: str) -> int:
    """One whole number.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if re.fullmatch(r"\s*-?\d{1,18}\s*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def as_json(given: argparse.Namespace, answers: Sequence[dict[str, Any]]) -> str:
    """One object where one size was asked for, else a list with one for each, redundancies fastest."""
    return json.dumps(answers[0] if len(sizes(given)) == 1 else list(answers))
