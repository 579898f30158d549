"""Implement ``ft diagnose``, which finds the causes of errors, in devices and in runs that crash or hang."""

from ft.base.subcommands import add_group

_SUBCOMMANDS = (
    "ft.observe.diagnose.command",
    "ft.observe.diagnose.silent_command",
    "ft.observe.diagnose.hang_command",
    "ft.observe.diagnose.crash_command",
    "ft.observe.diagnose.start_command",
)
"""Modules with an ``add_parser`` function each, in the order in which help lists them."""


def add_parser(subparsers) -> None:
    """Add ``diagnose`` with its subcommands."""
    add_group(
        subparsers,
        "diagnose",
        _SUBCOMMANDS,
        help="find why a run crashed, hangs or never starts, where runs differ, and which devices compute wrongly",
        description="Find why a run crashed, hangs or never starts, where runs differ, and which devices are wrong.",
    )
