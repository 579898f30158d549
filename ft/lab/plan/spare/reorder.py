"""Implement ``ft plan spare reorder``: show what the SPARe controller decides when several groups are lost at once.

In SPARe each part (shard type) of a step's data is hosted by several groups of ranks, and each group computes the first
S types of its stack, an ordered list of the types that it hosts. After a loss of groups the controller increases S or
reorders stacks, so that the survivors still compute every type. Types that are missing in the interrupted step are
computed additionally in this step (patch compute). If all hosts of a type are lost, this is a wipe-out.
"""

import argparse
import time
from typing import Any

from ft.base.quantities import several
from ft.lab.plan.spare.flags import add_sizes, as_json, sizes
from ft.show.text import left_out, shortened, table
from ft.systems.spare.controller import Controller, Reordering
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

_DESCRIPTION = """\
Show what the controller decides when some groups of the initial layout are lost at once: the stack S after which groups
take part in the all-reduce, the types that move into the first S positions of a group, and the types that have to be
computed additionally in the interrupted step."""

LEFT_OUT = left_out(
    "groups that return", "what a run does in a wipe-out: other groups compute the types, and nothing restarts"
)
_PHASES = ("0, the orders remain valid", "1, a deeper stack was enough", "2, types were moved")
_WIDTH = 100


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "reorder",
        help="show stack, moves and patch computes after a loss of groups",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_sizes(parser)
    parser.add_argument("--failed", type=several, required=True, metavar="A,B,...", help="groups, from 0, or ranges")
    parser.set_defaults(main=run)


def run(given: argparse.Namespace) -> int:
    """Print the decisions.

    Raises:
        UserError: a size cannot be placed, or the failed groups are invalid.
    """
    found = []
    for groups, redundancy in sizes(given):
        placement = Placement(groups, ruler(groups, redundancy))
        controller = Controller(placement)
        began = time.perf_counter()
        done = controller.lose(given.failed)
        found.append((done, (time.perf_counter() - began) * 1e3))
    if given.json:
        print(as_json(given, [as_values(done, time_ms) for done, time_ms in found]))
        return 0
    parts = [_as_text(size, *each) for size, each in zip(sizes(given), found, strict=True)]
    print("\n\n".join([LEFT_OUT, *parts]))
    return 0


def as_values(done: Reordering, time_ms: float) -> dict[str, Any]:
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


def _as_text(size: tuple[int, int], done: Reordering, time_ms: float) -> str:
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
