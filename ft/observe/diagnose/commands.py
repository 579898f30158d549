"""Implement ``ft diagnose``, which locates errors in runs and devices: ``compare``, ``silent`` and ``hang``."""

from ft.base.subcommands import add_group

_SUBCOMMANDS = ("ft.observe.diagnose.command", "ft.observe.diagnose.silent_command", "ft.observe.diagnose.hang_command")
"""Modules with an ``add_parser`` function each, in the order in which help lists them."""


def add_parser(subparsers) -> None:
    """Add ``diagnose`` with its subcommands."""
    add_group(
        subparsers,
        "diagnose",
        _SUBCOMMANDS,
        help="find where equal runs start to differ, which devices computed wrongly, and why a run hangs",
        description="Find where equal runs differ, which devices have computed wrongly, and why a run hangs.",
    )
