"""Implement ``ft plan spare``: ``place`` and ``reorder``, what SPARe hosts where and what it does after losses."""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

from ft.base.errors import UserError
from ft.base.flags import add_group
from ft.base.quantities import several
from ft.show.text import left_out, shortened, table
from ft.systems.spare.controller import Controller, Reordering
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import check, largest_redundancy, ruler

_DESCRIPTION = """\
In SPARe, each of N shard types is hosted by r of N groups (r is the redundancy), and the survivors of failures reorder
their stacks so that all types are computed in as few stacks as possible.
Numbers of groups and redundancies may be ranges (2..12) and lists (200,600); the output then has one answer per
pair."""


_PLACE = """\
Compute a ruler with which two types share at most one group: group w hosts type (w + mark) mod N for each mark. The
ruler is the optimal Golomb ruler if it fits, else a modular ruler for exactly this number of groups."""
_REORDER = """\
Show what the controller decides when some groups of the initial layout are lost at once: the stack S after which groups
take part in the all-reduce, the types that move into the first S positions of a group, and the types that have to be
computed additionally in the interrupted step."""


def add_parser(subparsers) -> None:
    """Add ``spare`` with its subcommands."""
    about = "show what SPARe hosts where, and how it reorders after losses"
    nested = add_group(subparsers, "spare", (), command="ft plan", help=about, description=_DESCRIPTION)
    place = _subcommand(
        nested, "place", run_place, "compute the ruler that places the types, and the resulting layout", _PLACE
    )
    about = "show stack, moves and patch computes after a loss of groups"
    reorder = _subcommand(nested, "reorder", run_reorder, about, _REORDER)
    place.add_argument("--ruler", type=several, metavar="0,A,B,...", help="use these marks, after a check")
    about = "groups, from 0, or ranges"
    reorder.add_argument("--failed", type=several, required=True, metavar="A,B,...", help=about)


def _subcommand(nested, name: str, main: Any, help: str, description: str) -> argparse.ArgumentParser:
    """Add a subcommand with ``--groups``, ``--redundancy`` and ``--json``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = nested.add_parser(name, help=help, description=description, formatter_class=raw)
    for flag, metavar, about in (
        ("--groups", "N", "number of groups, which is also the number of shard types"),
        ("--redundancy", "R", "number of hosts of each shard type"),
    ):
        parser.add_argument(flag, type=several, required=True, metavar=metavar, help=about)
    about = "print JSON instead of a table: one object, or a list of objects"
    parser.add_argument("--json", action="store_true", help=about)
    parser.set_defaults(main=main)
    return parser


def _sizes(given: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (number of groups, redundancy) for every pair of values that the flags ask for."""
    return list(product(given.groups, given.redundancy))


def _as_json(given: argparse.Namespace, answers: Sequence[dict[str, Any]]) -> str:
    """Return the answers as JSON text: an object for a single pair of sizes, else a list in the order of ``_sizes``."""
    return json.dumps(answers[0] if len(_sizes(given)) == 1 else list(answers))


_PLACE_OUT = left_out("failure domains: the hosts of a type may share a rack or a switch")


def run_place(given: argparse.Namespace) -> int:
    """Print the rulers.

    Raises:
        UserError: a size cannot be placed, or the given ruler is invalid.
    """
    placements = [_placement(groups, redundancy, given.ruler) for groups, redundancy in _sizes(given)]
    answers = [{"ruler": list(placement.ruler), "max_overlap": placement.max_overlap} for placement in placements]
    print(_as_json(given, answers) if given.json else f"{_PLACE_OUT}\n\n{_place_text(placements)}")
    return 0


def _placement(groups: int, redundancy: int, given: list[int] | None) -> Placement:
    if given is None:
        return Placement(groups, ruler(groups, redundancy))
    if len(given) != redundancy:
        raise UserError(
            f"the ruler has {len(given)} marks, and the redundancy is {redundancy}", "give one mark for each host"
        )
    return Placement(groups, check(given, groups))


def _place_text(placements: list[Placement]) -> str:
    head = ["groups", "redundancy", "at most", "overlap", "ruler"]
    rows = [
        [
            *(str(made.groups), str(made.redundancy), str(largest_redundancy(made.groups)), str(made.max_overlap)),
            " ".join(str(mark) for mark in made.ruler),
        ]
        for made in placements
    ]
    return table(head, rows, right=range(4))


_REORDER_OUT = left_out(
    "groups that return", "what a run does in a wipe-out: other groups compute the types, and nothing restarts"
)
_PHASES = ("0, the orders remain valid", "1, a deeper stack was enough", "2, types were moved")
_WIDTH = 100


def run_reorder(given: argparse.Namespace) -> int:
    """Print the decisions.

    Raises:
        UserError: a size cannot be placed, or the failed groups are invalid.
    """
    found = []
    for groups, redundancy in _sizes(given):
        placement = Placement(groups, ruler(groups, redundancy))
        controller = Controller(placement)
        began = time.perf_counter()
        done = controller.lose(given.failed)
        found.append((done, (time.perf_counter() - began) * 1e3))
    if given.json:
        print(_as_json(given, [_reorder_values(done, time_ms) for done, time_ms in found]))
        return 0
    parts = [_reorder_text(size, *each) for size, each in zip(_sizes(given), found, strict=True)]
    print("\n\n".join([_REORDER_OUT, *parts]))
    return 0


def _reorder_values(done: Reordering, time_ms: float) -> dict[str, Any]:
    """Return the decision as JSON values."""
    moves = [
        {"group": move.group, "type": move.kind, "from": move.from_position, "to": move.to_position}
        for move in done.moves
    ]
    return {
        "stack": done.stack,
        "moves": moves,
        "wipe_out": list(done.wipe_out),
        "phase": done.phase,
        "patch_types": list(done.patch_types),
        "time_ms": time_ms,
    }


def _reorder_text(size: tuple[int, int], done: Reordering, time_ms: float) -> str:
    rows = [["groups, redundancy", f"{size[0]}, {size[1]}"]]
    if done.wipe_out:
        rows.append(
            ["wipe-out", f"no host is left of types {_list(done.wipe_out)} (the paper: restart from a checkpoint)"]
        )
    else:
        rows += [["stack", str(done.stack)], ["phase", _PHASES[done.phase]]]
        rows.append(["patch", f"types {_list(done.patch_types)}" if done.patch_types else "not needed"])
    rows.append(["time", f"{time_ms:.3f} ms"])
    text = "\n".join(f"{name:<20}{value}" for name, value in rows)
    if not done.moves:
        return text
    moves = [[str(number) for number in move] for move in done.moves]
    return f"{text}\n\n" + table(["group", "type", "from position", "to"], moves, right=range(4))


def _list(kinds: tuple[int, ...]) -> str:
    return shortened(", ".join(str(kind) for kind in kinds), _WIDTH)
