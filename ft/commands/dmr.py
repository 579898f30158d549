"""Define the command ``ft dmr`` and its subcommands, which plan, explain, estimate and test double execution."""

from ft.base.flags import add_group

_SUBCOMMANDS = (
    "ft.systems.dmr.profile.command",
    "ft.systems.dmr.plan.command",
    "ft.lab.estimate.command",
    "ft.lab.reproducibility.command",
)
"""Modules with an ``add_parser`` function each, in the order in which the help text lists their subcommands."""

_DESCRIPTION = """\
DMR (SpareTrain) executes every operator twice and compares the results, which detects silent data corruption. A plan
says when each operator is executed the second time: with the recomputation of activation checkpointing, in a window in
which the device is idle, or at once."""


def add_parser(subparsers) -> None:
    """Add ``dmr`` with its subcommands."""
    add_group(
        subparsers,
        "dmr",
        _SUBCOMMANDS,
        help="plan double execution of operators (DMR), and estimate what it costs",
        description=_DESCRIPTION,
    )
