"""The command ``ft faults``, which prints all kinds of faults and their outcomes."""

import argparse
import textwrap

from ft.base.checkout import CHECKOUT
from ft.faults import keys
from ft.faults.kinds import MEANING
from ft.faults.table import GROUPS

_EPILOG = """examples:
  ft faults                                        the table
  ft faults --markdown > docs/what_happens_when.md
  ft run --inject hang@step=20:rank=3 ...          injects one of them
"""


def add_parser(subparsers) -> None:
    """Add the command ``faults`` to the parser of ``ft``."""
    parser = subparsers.add_parser(
        "faults",
        help="list every kind of fault: how it is injected, how it is classified, and what happens then",
        description="List every kind of fault: how it is injected, how it is classified, and what happens then.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the page 'What happens when X fails' as Markdown"
    )
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Print the table or the page; return 0."""
    from ft.faults.page import page, read_times

    print(page(read_times(CHECKOUT)) if given.markdown else text(), end="")
    return 0


def text() -> str:
    """Return the table of faults for a terminal."""
    rows = [row for group in GROUPS.values() for row in group]
    name, outcome = (max(map(len, texts)) for texts in ([row.name for row in rows], MEANING))
    lines = []
    for heading, group in GROUPS.items():
        lines.append(f"{heading}")
        for row in group:
            needs = f" [{row.needs}]" if row.needs else ""
            signal = f" (seen as: {row.sign.signal})" if row.sign is not None else ""
            lines.append(f"  {row.name:{name}}  {row.outcome:{outcome}}  {row.does}{signal}{needs}")
    lines.append("")
    lines += [f"{outcome}: {meaning}" for outcome, meaning in MEANING.items()]
    lines += ["", "KIND@KEY=VALUE[:KEY=VALUE...][,...]"]
    for heading, sayings in keys.MEANING.items():
        lines.append(heading)
        lines += [f"  {key:11}  {saying}" for key, saying in sayings.items()]
    lines += ["", *textwrap.wrap(keys.SEED, 118), "", keys.SCENARIO.rstrip()]
    return "\n".join(lines) + "\n"
