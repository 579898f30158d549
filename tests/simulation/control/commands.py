"""The ``python -m tests.simulation control`` subcommand: its arguments, and the call of the simulation."""

import argparse

from ft.base.errors import UserError
from tests.simulation import histories
from tests.simulation.control.faults import BY_NAME
from tests.simulation.control.mutants import find, planted
from tests.simulation.control.report import Summary
from tests.simulation.control.run import History, SimulationOptions, simulate
from tests.simulation.mutation import Replaced


def add_parser(simulations) -> None:
    """Add the subcommand ``control``, with ``run`` as its function.

    Args:
        simulations: the subparsers of ``ft simulate``.
    """
    parser = simulations.add_parser(
        "control",
        help="the control plane's decisions under simulated faults",
        description="Plays histories of simulated clusters, each from its seed, with the production code "
        "of the control plane and of the workers' protocol in them, and checks that training is right in all of them "
        "and that none hangs.",
    )
    histories.add_arguments(parser, faults=9)
    parser.add_argument("--ranks", type=int, metavar="N", help="logical ranks of every run (default: 2 to 8)")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate the runs and print the result.

    Returns:
        The exit status: 1 if a run violates a property, or if an injected bug is not found.

    Raises:
        UserError: an argument is out of range.
    """
    kinds = histories.check_arguments(_SIMULATION, arguments)
    if arguments.ranks is not None and not 2 <= arguments.ranks <= 64:
        raise UserError(f"--ranks {arguments.ranks}", "give 2 to 64")
    return histories.run(_SIMULATION, arguments, SimulationOptions(arguments.faults, arguments.ranks, kinds))


def _play(seed: int, options: SimulationOptions, plant: Replaced | None, with_lines: bool) -> History:
    with planted(plant):
        return simulate(seed, options, with_lines=with_lines)


_SIMULATION = histories.Simulation("control", tuple(BY_NAME), _play, find, Summary, columns=(50, 110))
