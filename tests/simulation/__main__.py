"""The command ``python -m tests.simulation``."""

import sys

from ft.base.errors import UserError
from ft.base.flags import Parser
from tests.simulation.campaign import add_parser, named
from tests.simulation.hangs import run as hangs


def main(argv: list[str] | None = None) -> int:
    """Run one simulation and return its exit code, which is 2 if the input is invalid."""
    parser = Parser(prog="python -m tests.simulation", description="Simulate protocols under faults.")
    simulations = parser.add_subparsers(title="simulations", metavar="SIMULATION", required=True)
    for name in ("control", "hsdp"):
        add_parser(simulations, named(name))
    hangs.add_parser(simulations)
    try:
        given = parser.parse_args(argv)
        return given.main(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
