"""The ``ft simulate`` command. Each subpackage of ``ft.lab.simulate`` with a simulation adds its own subcommand."""

import importlib.util

_SIMULATIONS = (
    "ft.lab.simulate.hsdp.commands",
    "ft.lab.simulate.churn.commands",
)


def add_parser(subparsers) -> None:
    """Add the command ``simulate``, with one subcommand for each simulation package that is installed."""
    parser = subparsers.add_parser("simulate", help="simulate large clusters and rare failures")
    simulations = parser.add_subparsers(title="simulations", metavar="SIMULATION", required=True)
    for module in _SIMULATIONS:
        if importlib.util.find_spec(module.rpartition(".")[0]) is not None:
            importlib.import_module(module).add_parser(simulations)
