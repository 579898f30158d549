"""Implement ``ft plan``: planning tools for recovery, snapshots, pipeline schedules and redundancy of training data.

There is one subcommand for each question.
"""

from ft.base.flags import add_group

_SUBCOMMANDS = (
    "ft.lab.plan.disruption.commands",
    "ft.lab.plan.snapshot.commands",
    "ft.lab.plan.policy.commands",
    "ft.lab.plan.schedule.commands",
    "ft.lab.plan.spare.commands",
)


def add_parser(subparsers) -> None:
    """Add ``plan`` with its subcommands."""
    add_group(
        subparsers,
        "plan",
        _SUBCOMMANDS,
        help="plan recovery, snapshots, pipeline schedules and redundancy before a run",
    )
