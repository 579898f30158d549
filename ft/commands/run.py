"""Define the command ``ft run``: read the command line and run the agent of this node.

The agent is the process that starts and supervises the node's workers. With ``--ft-hsdp-replicas``,
:mod:`ft.commands.replicas` takes over.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from ft import faults as inject
from ft.base import output
from ft.base.errors import Problems
from ft.commands import arguments, checkouts, protection
from ft.commands import replicas as launch
from ft.commands.protection import LaunchLine, RunProtection
from ft.job.agent import mpirun
from ft.job.agent.agent import carry_out
from ft.job.agent.console import Console
from ft.job.agent.options import RunOptions, resolve, script_of
from ft.platform import slurm
from ft.platform.slurm import JobPlace
from ft.record.run import read_status

_EPILOG = """
Start ft run once on every node, like torchrun. A plain torchrun script runs unchanged. A script that joins the run
(with pretrain_gpt.py: --ft-hot-swap; in a script of your own: ft.attach) continues when workers die.

  ft run --nproc-per-node 4 --standby 1 pretrain_gpt.py ... --ft-hot-swap
  ft run --nproc-per-node 4 --standby 1 --inject kill@step=20:rank=3 pretrain_gpt.py ... --ft-hot-swap
  srun --ntasks-per-node=1 ft run --nproc-per-node gpu --standby-nodes 1 pretrain_gpt.py ...
  ft run --nproc-per-node 6 --ft-hsdp-replicas 3 pretrain_gpt.py ...
  mpirun --with-ft ulfm -n 5 --map-by ppr:1:node ft run --nproc-per-node gpu --standby-nodes 1 --ft-transport mpi ...
"""


def add_parser(subparsers) -> None:
    """Add ``run`` to the command ``ft``."""
    parser = subparsers.add_parser(
        "run",
        help="run a script on this node's workers, like torchrun, and recover from failures",
        description="Run a script on this node's workers, like torchrun, and recover from failures.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        is_launcher=True,
        scripts_flags=protection.trainers_flags,
    )
    arguments.add_flags(parser)
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> NoReturn:
    """Run the agent of this node, and end the process with the run's exit code.

    Exit codes: 0 if all workers have finished, 2 for bad input, 76 if they have finished, but --inject-strict asks for
    faults that were not injected, 128+N after signal N, others as the failure that ended the run.

    Raises:
        UserError: the flags cannot work; nothing has been started.
    """
    output.install()
    protection.choose_trainer(given)
    job = mpirun.take_part(given) if mpirun.wanted(given) else None
    if launch.wanted(given):
        launch.main(given, job)
    options, faults, protected = prepare(given, os.environ, job)
    nodes, console = options.cluster.nnodes, Console(options.quiet)
    joined = protection.has_joined(nodes) if protected.by == protection.UNKNOWN else ""
    code = carry_out(options, faults, _announcement(options, faults, protected), joined=joined)
    if protected.by == protection.UNKNOWN and code == 0 and read_status(options.run_dir).get("protected") is False:
        console.say("no worker called ft.attach or ft.protect, so nothing protected this run")
    code = protection.judge_faults(code, options.run_dir, given.inject_strict, console.say)
    is_first_lost = slurm.lost_first_node(read_status(options.run_dir))
    slurm.end_orphaned_job(os.environ, is_first_lost, console.complain)
    console.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may be inside torch's store, and the interpreter's normal exit would abort the process


def prepare(
    given: argparse.Namespace, environment: Mapping[str, str], job: JobPlace | None = None
) -> tuple[RunOptions, list[inject.Fault], RunProtection]:
    """Return the options, the planned faults, and how the run is protected.

    Args:
        job: the Slurm or MPI job that ``ft run`` is part of; None: it is in no job.

    Raises:
        UserError: lists every problem with the flags of ``ft run`` and, for this project's trainer, of the trainer.
    """
    problems, options, faults, protected = Problems(), None, [], RunProtection(protection.UNKNOWN)
    with problems:
        options = resolve(given, environment, job)
    with problems:
        if options is not None:
            faults = plan_faults(options, given)
        else:  # the run's size is unknown, so it cannot be checked that the victim of a fault exists
            inject.read_specs(given.inject, given.scenario, given.seed)
    if given.script is not None:
        asked = None if options is None else _asked(options, given)
        with problems:
            protected, found = protection.examine(script_of(given), asked, faults)
            problems.add(found)
    problems.refuse()
    if checkouts.is_protected_checkout(options.script):
        options = replace(options, script=checkouts.adapted(options.script))
    return options, faults, protected


def _asked(options: RunOptions, given: argparse.Namespace) -> LaunchLine:
    flags = [f"--inject {text}" for text in given.inject]
    flags += [f"--scenario {given.scenario}"] if given.scenario else []
    return LaunchLine(options.world_size, [*flags, *options.standby_flags])


def plan_faults(options: RunOptions, given: argparse.Namespace) -> list[inject.Fault]:
    """Return the faults of ``--inject`` and ``--scenario``, the same on every node.

    Raises:
        UserError: a fault cannot be parsed or has no victim.
    """
    nodes = [f"n{i}" for i in range(options.cluster.nnodes)]
    specs, seed = inject.read_specs(given.inject, given.scenario, given.seed)
    return inject.schedule(specs, options.world_size, nodes, seed)


def _announcement(options: RunOptions, faults: list[inject.Fault], protected: RunProtection) -> str:
    cluster = options.cluster
    parts = [f"{options.world_size} logical ranks on {cluster.training_nodes} node(s)"]
    if options.standbys_here:
        keeps = ", each with as much memory ready as a rank's" if protected.by == protection.HOT_SWAP else ""
        parts.append(f"{options.standbys_here} standby(s) here{keeps}")
    if cluster.standby_nodes:
        parts.append(f"{cluster.standby_nodes} standby node(s)")
    if options.domains:
        parts.append("this node in " + " and ".join(f"{kind} {name}" for kind, name in options.domains.items()))
    if faults:
        parts.append(f"{len(faults)} fault(s) planned")
    if options.left_out.node:
        parts.append(options.left_out.node)
    elif options.left_out.devices:
        parts.append(f"without device(s) {', '.join(options.left_out.devices)} of this host (--suspects)")
    says = protection.announcement(protected, cluster.nnodes)
    return f"run {options.run_dir}: {', '.join(parts)}\n{says}"
