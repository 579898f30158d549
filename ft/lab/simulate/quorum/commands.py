"""The ``ft simulate quorum`` subcommand, which measures the latency of FT-HSDP's quorum for any number of ranks."""

import argparse
import json

from ft.base.quantities import count
from ft.lab.simulate.quorum.run import emulate
from ft.lab.simulate.quorum.shape import Job, processes
from ft.lab.simulate.quorum.table import as_text, as_values
from ft.state.groups.tree import FAN_OUT

_DESCRIPTION = """\
Measure the latency of FT-HSDP's quorum at scale (section 5 of its paper) with the real quorum server, clients and
relays on this machine's loopback network: from the last replica's report until the last logical rank has the quorum."""


def add_parser(simulations) -> None:
    """Add the subcommand ``quorum``, with ``run`` as its function.

    Args:
        simulations: the subparsers of ``ft simulate``.
    """
    parser = simulations.add_parser(
        "quorum",
        help="measure the latency of FT-HSDP's quorum for any number of ranks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=98304, metavar="N", help="logical ranks (default: 98304)")
    parser.add_argument(
        "--replicas", type=int, default=12, metavar="N", help="number of replicas that the ranks form (default: 12)"
    )
    parser.add_argument(
        "--node", type=int, default=FAN_OUT, metavar="N", help=f"ranks that a relay serves (default: {FAN_OUT})"
    )
    parser.add_argument("--fan-out", type=int, default=FAN_OUT, metavar="N", help=f"of relays (default: {FAN_OUT})")
    parser.add_argument(
        "--rounds", type=int, default=100, metavar="N", help="number of quorums to measure (default: 100)"
    )
    parser.add_argument(
        "--deaths", type=int, default=0, metavar="N", help="number of leaders that are lost during the run (default: 0)"
    )
    parser.add_argument("--seed", type=count(0), default=1, metavar="N", help="default: 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the emulation, print the latencies, and return the exit status 0.

    Raises:
        UserError: an argument is out of range, or this machine cannot run the emulation.
    """
    job = Job(
        ranks=arguments.ranks,
        replicas=arguments.replicas,
        node=arguments.node,
        fan_out=arguments.fan_out,
        rounds=arguments.rounds,
        deaths=arguments.deaths,
        seed=arguments.seed,
    ).check()
    measured = emulate(job, processes(job))
    print(json.dumps(as_values(job, measured)) if arguments.json else as_text(job, measured))
    return 0
