"""Implement ``ft plan spare``, which has one subcommand for each question about SPARe.

SPARe protects data-parallel training: each part (shard type) of a step's data is hosted by several groups of ranks, and
the survivors of a failure compute the parts of the lost groups.
"""

from ft.base.flags import add_group

_SUBCOMMANDS = (
    "ft.lab.plan.spare.theory",
    "ft.lab.plan.spare.place",
    "ft.lab.plan.spare.reorder",
)
"""Modules with an ``add_parser`` function each, in the order in which help lists them."""

_DESCRIPTION = """\
In SPARe, each of N shard types is hosted by r of N groups (r is the redundancy), and the survivors of failures reorder
their stacks so that all types are computed in as few stacks as possible.
Numbers of groups and redundancies may be ranges (2..12) and lists (200,600); the output then has one answer per
pair."""


def add_parser(subparsers) -> None:
    """Add ``spare`` with its subcommands."""
    add_group(
        subparsers,
        "spare",
        _SUBCOMMANDS,
        command="ft plan",
        help="plan the redundancy of SPARe: failures endured, stacks computed, placement, reordering",
        description=_DESCRIPTION,
    )
