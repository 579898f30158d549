"""``ft simulate``: each simulation brings a subcommand of its own."""

import importlib.util

_SIMULATIONS = (
    "ft.simulate.control.commands",
    "ft.simulate.recovery.commands",
    "ft.simulate.hsdp.commands",
    "ft.simulate.quorum.commands",
    "ft.simulate.hsdp_protocol.commands",
    "ft.simulate.churn.commands",
)


def add_parser(subparsers) -> None:
    """Adds ``simulate`` with one subcommand for each simulation there is."""
    parser = subparsers.add_parser("simulate", help="simulated clusters, larger and unluckier than the one at hand")
    simulations = parser.add_subparsers(title="simulations", metavar="SIMULATION", required=True)
    for module in _SIMULATIONS:
        if importlib.util.find_spec(module.rpartition(".")[0]) is not None:
            importlib.import_module(module).add_parser(simulations)
