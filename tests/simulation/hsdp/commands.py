"""The ``python -m tests.simulation hsdp`` subcommand: its arguments, and the call of the simulation."""

import argparse

from tests.simulation import histories
from tests.simulation.hsdp.faults import BY_NAME
from tests.simulation.hsdp.mutants import find
from tests.simulation.hsdp.report import Summary
from tests.simulation.hsdp.run import History, SimulationOptions, simulate
from tests.simulation.mutation import Replaced, planted


def add_parser(simulations) -> None:
    """Add the subcommand ``hsdp-protocol``, with ``run`` as its function.

    Args:
        simulations: the subparsers of ``ft simulate``.
    """
    parser = simulations.add_parser(
        "hsdp",
        help="FT-HSDP's protocol under simulated faults",
        description="Plays histories of simulated replicas, each from its seed, with production's protocol of "
        "replicas and quorum server in them, and checks that healthy replicas are equal, that the line of steps that "
        "survives has every sample once, that at most the interrupted step is done again, and that nobody waits for "
        "ever.",
    )
    histories.add_arguments(parser, faults=8)
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate the runs and print the result.

    Returns:
        The exit status: 1 if a run violates a property, or if an injected bug is not found.

    Raises:
        UserError: an argument is out of range.
    """
    kinds = histories.check_arguments(_SIMULATION, arguments)
    return histories.run(_SIMULATION, arguments, SimulationOptions(arguments.faults, kinds))


def _play(seed: int, options: SimulationOptions, plant: Replaced | None, with_lines: bool) -> History:
    with planted(plant):
        return simulate(seed, options, with_lines)


_SIMULATION = histories.Simulation("hsdp", tuple(BY_NAME), _play, find, Summary, columns=(56, 120))
