"""``ft run``: from the command line to a running agent."""

import argparse
import os
import sys
from typing import NoReturn

from ft import inject
from ft.agent import allocation, arguments, mpirun
from ft.agent.carry_out import carry_out
from ft.agent.console import Console
from ft.agent.options import RunOptions, resolve
from ft.hsdp.launch import run as launch
from ft.report.run import read_status

_EPILOG = """
Start it once on every node, as torchrun. A plain torchrun script simply runs; one that joins the run (with
pretrain_gpt.py: --ft-hot-swap; in a script of your own: ft.attach) survives the death of its workers.

  ft run --nproc-per-node 4 --standby 1 pretrain_gpt.py ... --ft-hot-swap
  ft run --nproc-per-node 4 --standby 1 --inject kill@step=20:rank=3 pretrain_gpt.py ... --ft-hot-swap
  srun --ntasks-per-node=1 ft run --nproc-per-node gpu --standby-nodes 1 pretrain_gpt.py ...
  ft run --nproc-per-node 6 --ft-hsdp-replicas 3 pretrain_gpt.py ...
  mpirun --with-ft ulfm -n 5 --map-by ppr:1:node ft run --nproc-per-node gpu --standby-nodes 1 --ft-transport mpi ...
"""


def add_parser(subparsers) -> None:
    """Adds ``run`` to the command ``ft``."""
    parser = subparsers.add_parser(
        "run",
        help="run a script on this node's workers, as torchrun, and carry it through faults",
        description="Runs a script on this node's workers, as torchrun does, and carries it through faults.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    arguments.add_flags(parser)
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> NoReturn:
    """Runs the agent of this node and ends the process with the run's exit code.

    0 all workers have finished, 2 the input cannot work, 128+N ended by signal N, others: what ended the run.

    Raises:
        UserError: the flags cannot work; nothing has been started.
    """
    job = mpirun.take_part(given) if mpirun.wanted(given) else None
    if launch.wanted(given):
        launch.main(given, job)
    options = resolve(given, os.environ, job)
    faults = plan_faults(options)
    code = carry_out(options, faults, _announcement(options, faults))
    is_first_lost = allocation.lost_first_node(read_status(options.run_dir))
    allocation.end_orphaned_job(os.environ, is_first_lost, Console(options.quiet).complain)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may be inside torch's store: the interpreter's orderly end would abort the process


def plan_faults(options: RunOptions) -> list[inject.Fault]:
    """The faults of ``--inject`` and ``--scenario``, the same on every node.

    Raises:
        UserError: one of them cannot be understood or has no victim.
    """
    nodes = [f"n{i}" for i in range(options.cluster.nnodes)]
    specs, seed = [], options.seed
    for text in options.inject:
        specs += inject.parse(text)
    if options.scenario:
        scenario = inject.read_scenario(options.scenario)
        specs += scenario.specs
        seed = scenario.seed if seed is None else seed
    return inject.schedule(specs, options.world_size, nodes, seed or 0)


def _announcement(options: RunOptions, faults: list[inject.Fault]) -> str:
    cluster = options.cluster
    parts = [f"{options.world_size} logical ranks on {cluster.training_nodes} node(s)"]
    if options.standbys_here:
        parts.append(f"{options.standbys_here} standby(s) here")
    if cluster.standby_nodes:
        parts.append(f"{cluster.standby_nodes} standby node(s)")
    if options.domains:
        parts.append("this node in " + " and ".join(f"{kind} {name}" for kind, name in options.domains.items()))
    if faults:
        parts.append(f"{len(faults)} fault(s) planned")
    return f"run {options.run_dir}: {', '.join(parts)}"
