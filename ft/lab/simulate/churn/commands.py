"""The ``ft simulate churn`` subcommand: training time of a pipeline that loses whole stages, by recovery strategy."""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.lab.simulate.churn.fit import fit, matching_rate
from ft.lab.simulate.churn.scenario import FIELDS, TITLES, probability, read, scenario
from ft.lab.simulate.churn.study import study
from ft.lab.simulate.churn.table import as_text, as_values
from ft.lab.simulate.fields import add_flags

_DESCRIPTION = """\
Simulate how long a pipeline that loses whole stages trains until a target loss, with checkpointing, redundant
computation, CheckFree and CheckFree+. The scenario is a file, or flags, or both; flags override the file. Times have a
unit (ms, s, m or min, h, d). The default is the training of CheckFree, table 2."""


def add_parser(simulations) -> None:
    """Add the subcommand ``churn``, with ``run`` as its function.

    Args:
        simulations: the subparsers of ``ft simulate``.
    """
    parser = simulations.add_parser(
        "churn",
        help="simulate the time to train under stage failures with CheckFree and other strategies",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="FILE", help="scenario file, such as those in examples/")
    add_flags(parser, FIELDS, TITLES)
    parser.add_argument("--fit", metavar="RATE", help=_FIT)
    parser.add_argument("--match", action="store_true", help=_MATCH)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--plot",
        metavar="PNG",
        help="write a picture to this file: time by failure rate, and the loss of one run of each strategy",
    )
    parser.set_defaults(main=run)


_FIT = "first fit the jump and the slowdown to the hours published at RATE; the other rates are then predictions"
_MATCH = "also compute the failure rates at which the simulation takes the published hours; takes some seconds"


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison of the strategies, plot it if requested, and return the exit status 0.

    Raises:
        UserError: the arguments contradict each other, or the plot cannot be written.
    """
    values = read(arguments.scenario, {name: getattr(arguments, name.replace("-", "_")) for name in FIELDS})
    fitted = None
    if arguments.fit is not None:
        fitted = fit(values, _rate(arguments.fit))
        values |= {"jump": fitted.jump, "slowdown": fitted.slowdown}
    asked = scenario(values)
    rows = list(study(asked))
    matched = None
    if arguments.match:
        matched = [row.published and matching_rate(asked, row.strategy, row.published) for row in rows]
    shown = as_values if arguments.json else as_text
    found = shown(asked, rows, fitted, matched)
    print(json.dumps(found) if arguments.json else found)
    if arguments.plot is not None:
        # Imported here because importing matplotlib takes longer than everything else in this command.
        from ft.lab.simulate.churn.picture import draw

        try:
            draw(asked, rows, Path(arguments.plot))
        except (OSError, ValueError) as error:
            raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error
    return 0


def _rate(text: str) -> float:
    try:
        return probability(text)
    except ValueError as error:
        raise UserError(f"--fit {text}: {error}", "name a rate of the scenario's [published], such as 10%") from error
