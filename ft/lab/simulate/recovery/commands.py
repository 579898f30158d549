"""The ``ft simulate recovery`` subcommand: process groups that a hot-swap rebuilds, and the time this takes."""

import argparse
import json
from pathlib import Path

from ft.base.errors import UserError
from ft.base.quantities import argument, count, whole

_DESCRIPTION = """\
Compute which process groups a hot-swap rebuilds at any number of ranks. megatron-core lays the groups out, and the
production code decides which groups are rebuilt after the loss of a rank or of a node. With measurements (--results of
tools/bench/rebuild.py, or --measure), the time is predicted, too; beyond the measured ranks it is extrapolated."""
_MOST_RANKS = 16384


def add_parser(subparsers) -> None:
    """Add the subcommand ``recovery``, with ``run`` as its function.

    Args:
        subparsers: the subparsers of ``ft simulate``.
    """
    parser = subparsers.add_parser(
        "recovery",
        help="compute which groups a recovery rebuilds, with how many connections, on 8 to thousands of ranks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=argument(_ranks), default=_ranks("8..4096"), metavar="N|A..B", help=_RANKS)
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{name}", type=count(), metavar="N", help=f"{what} parallel size")
    parser.add_argument("--cp", type=count(), default=1, metavar="N", help="context parallel size (default: 1)")
    parser.add_argument("--ep", type=count(), default=1, metavar="N", help="expert parallel size (default: 1)")
    parser.add_argument("--experts", action="store_true", help="the model has experts (implied by --ep)")
    parser.add_argument("--ranks-per-node", type=count(), default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--lost", type=count(0), default=0, metavar="RANK", help="logical rank that is lost (default: 0)"
    )
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--results", metavar="FILE", help="lines of tools/bench/rebuild.py")
    times.add_argument(
        "--measure", action="store_true", help="first measure on 8, 16 and 32 ranks on this machine; takes minutes"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array instead of text")
    parser.add_argument("--plot", metavar="FILE", help="a picture of it, PNG")
    parser.set_defaults(main=run)


_RANKS = "number of ranks: one number, several with commas, or A..B for A, 2A, 4A up to B (default: 8..4096)"


def run(arguments: argparse.Namespace) -> int:
    """Compute the rebuilds for all layouts, print them, plot them if requested, and return the exit status 0.

    Raises:
        UserError: the layout is impossible, the results are unusable, or the plot cannot be written.
    """
    from megatron.ft_trainer.logging.quiet import quieten

    quieten()
    from ft.lab.simulate.recovery.sweep import layouts, sweep
    from ft.lab.simulate.recovery.table import as_text, as_values

    if arguments.lost >= min(arguments.ranks):
        raise UserError(
            f"--lost {arguments.lost} with {min(arguments.ranks)} ranks: they are 0 to {min(arguments.ranks) - 1}",
            "give a rank that exists, or more --ranks",
        )
    found = layouts(arguments.ranks, arguments.tp, arguments.pp, arguments.dp, arguments.cp, arguments.ep)
    fitted = _fit(arguments)
    entries = sweep(found, arguments.ranks_per_node, arguments.lost, arguments.experts or arguments.ep > 1)
    print(json.dumps(as_values(entries, fitted)) if arguments.json else as_text(entries, fitted))
    if arguments.plot is not None:
        # Imported here because importing matplotlib takes longer than everything else in this command.
        from ft.lab.simulate.recovery.picture import draw

        try:
            draw(entries, fitted, Path(arguments.plot))
        except (OSError, ValueError) as error:
            raise UserError(f"the picture cannot be written: {error}", "give --plot a path ending in .png") from error
    return 0


def _fit(arguments: argparse.Namespace):
    """Return the fitted model of the rebuild time; None if neither results nor a measurement is requested."""
    from ft.lab.simulate.recovery.fit import fit, read

    if arguments.results is not None:
        return fit(read(arguments.results))
    if arguments.measure:
        from ft.lab.simulate.recovery.measure import LAYOUTS, measure

        return fit([row for sizes in LAYOUTS for row in measure(sizes)])
    return None


def _ranks(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    if not dots:
        return sorted({whole(2, _MOST_RANKS)(word) for word in text.split(",")})
    at, end, found = whole(2, _MOST_RANKS)(first), whole(2, _MOST_RANKS)(last), []
    while at <= end:
        found.append(at)
        at *= 2
    if not found:
        raise ValueError(f"is empty: {first} is more than {last}")
    return found
