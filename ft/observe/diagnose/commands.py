"""Implement ``ft diagnose``, which locates errors in runs and devices: ``compare`` and ``silent``."""

from ft.base.subcommands import add_group

_SUBCOMMANDS = ("ft.observe.diagnose.command", "ft.observe.diagnose.silent_command")
"""Modules with an ``add_parser`` function each, in the order in which help lists them."""


def add_parser(subparsers) -> None:
    """Add ``diagnose`` with its subcommands."""
    add_group(
        subparsers,
        "diagnose",
        _SUBCOMMANDS,
        help="find where equal runs start to differ, and which devices computed wrongly",
        description="Find where runs that should be equal differ, and which devices have computed wrongly.",
    )
