"""Implement ``ft diagnose``, which locates errors in runs; its subcommand ``compare`` compares runs' checkpoints."""

from ft.base.subcommands import add_group

_SUBCOMMANDS = ("ft.observe.diagnose.command",)
"""Modules with an ``add_parser`` function each, in the order in which help lists them."""


def add_parser(subparsers) -> None:
    """Add ``diagnose`` with its subcommands."""
    add_group(
        subparsers,
        "diagnose",
        _SUBCOMMANDS,
        help="find where runs of the same training start to differ: step, parameter, rank",
        description="Find the cause of differences between runs that should be equal.",
    )
