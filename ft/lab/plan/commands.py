"""Implement ``ft plan``: what to buy and how to run it. There is one subcommand for each question."""

from ft.base.flags import add_group
from ft.lab.estimate import command

_SUBCOMMANDS = (
    "ft.lab.plan.goodput.buy",
    "ft.lab.plan.goodput.views",
    "ft.lab.plan.snapshot.command",
    "ft.lab.plan.policy",
    "ft.lab.plan.schedule",
    "ft.lab.plan.spare",
)


def add_parser(subparsers) -> None:
    """Add ``plan`` with its subcommands."""
    nested = add_group(
        subparsers,
        "plan",
        _SUBCOMMANDS,
        help="what to buy before a run: protections, standbys, intervals, copies, schedules, redundancy",
    )
    command.add_parser(nested, "dmr")
