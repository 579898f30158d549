"""Define the command ``ft selftest``, which checks a machine or a cluster before training relies on fault tolerance."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ft.base import files
from ft.base.errors import Problems, UserError
from ft.base.flags import Parser
from ft.base.quantities import argument, between, count
from ft.lab.selftest import session
from ft.lab.selftest.session import Executor, Interrupted, NodePlace, SelfTest, TestPlan, as_text, as_values
from ft.lab.selftest.table import CHECKS, chosen
from ft.platform import slurm

_DESCRIPTION = """\
Check that this machine, or all nodes of a Slurm allocation, can do what fault-tolerant training needs: abort and remake
process groups, replace workers, snapshot at speed, reduce and digest without a wrong bit. Each check says what it found
and, if it fails, what to do.
Exit code 0: no check failed; 1: one has failed; 2: the flags are invalid; 128+N: ended by signal N."""
RECORD = "selftest.json"
"""File in the self-test's folder with what ``--json`` prints."""
_PORT = 29400


def add_parser(subparsers) -> None:
    """Add the subcommand."""
    parser: Parser = subparsers.add_parser(
        "selftest",
        help="check that this machine or cluster can do what fault-tolerant training needs",
        description=_DESCRIPTION,
        epilog="checks, in order:\n" + "\n".join(f"  {one.name:13} {one.shows}" for one in CHECKS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    number = argument(between(0.05, 10_000))
    parser.add_argument("--gpus", type=count(), metavar="N", help="use at most N GPUs of each node (default: all)")
    parser.add_argument(
        "--nodes", type=count(), metavar="N", help="number of nodes (default: those of the Slurm allocation, else 1)"
    )
    parser.add_argument("--node-rank", type=count(0), metavar="I", help="outside Slurm: number of this node, from 0")
    parser.add_argument("--rdzv-endpoint", metavar="HOST[:PORT]", help="outside Slurm: where node 0 listens")
    parser.add_argument(
        "--minutes",
        type=number,
        default=10.0,
        metavar="M",
        help="longest duration; the most important checks come first",
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", help="a folder as ft run's, on storage of all nodes (default: runs/selftest-...)"
    )
    parser.add_argument("--only", action="append", metavar="CHECK[,...]", help="only these checks")
    parser.add_argument(
        "--plant", action="append", default=[], metavar="CHECK[,...]", help="make these checks fail, as a trial"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(main=main)


def main(given: argparse.Namespace) -> int:
    """Run the self-test, and print its outcome on node 0.

    Raises:
        UserError: the flags cannot work, or a node has not joined.
    """
    job = None if given.nodes == 1 else slurm.read(os.environ)
    if session.is_alone_in(job, os.environ):
        return _on_all_nodes(given)
    plan = plan_of(given, job, os.environ)
    try:
        with Executor() as executor:
            test = SelfTest(plan, executor)
            if plan.place.node:
                test.follow()
                return 0
            outcome = test.lead()
    except Interrupted as interruption:
        print(f"ended by {interruption}", file=sys.stderr)
        return 128 + interruption.signum
    values = json.dumps(as_values(outcome))
    (Path(outcome.folder) / RECORD).write_text(f"{values}\n")
    print(values if given.json else as_text(outcome))
    return 0 if outcome.passed else 1


def plan_of(given: argparse.Namespace, job: slurm.JobPlace | None, environment: Mapping[str, str]) -> TestPlan:
    """Return what the flags ask for.

    Raises:
        UserError: lists every problem of the flags.
    """
    problems, checks, planted, place = Problems(), list(CHECKS), [], NodePlace()
    with problems:
        checks = checks if given.only is None else chosen(given.only, "--only")
    with problems:
        planted = chosen(given.plant, "--plant")
    with problems:
        place = place_of(given, job)
    if left := [check.name for check in planted if check not in checks]:
        problems.add([(f"--plant {', '.join(left)} is not among --only", "name the check in both")])
    if place.nnodes > 1 and given.run_dir is None and job is None:
        problems.add([("several nodes need a folder that they share", "give --run-dir the same folder on all nodes")])
    problems.refuse()
    name = time.strftime("%Y%m%d-%H%M%S") if job is None else f"{job.job}.{environment.get('SLURM_STEP_ID', '0')}"
    run_dir = Path(given.run_dir or f"runs/selftest-{name}")
    if problem := files.why_unsafe(run_dir):
        raise UserError(f"--run-dir {run_dir} is not safe from other users: {problem}", "give a new folder of your own")
    if (run_dir / "node-0").exists():
        raise UserError(f"{run_dir} holds a self-test already", "give --run-dir a new folder")
    return TestPlan(checks, frozenset(check.name for check in planted), 60 * given.minutes, run_dir, given.gpus, place)


def place_of(given: argparse.Namespace, job: slurm.JobPlace | None) -> NodePlace:
    """Return this node's place among the nodes, from the flags or from Slurm.

    Raises:
        UserError: the flags contradict each other or the Slurm job.
    """
    number = given.nodes or (job.nnodes if job is not None else 1)
    if job is not None and number != job.nnodes:
        raise UserError(f"--nodes {number}, but this Slurm step has {job.nnodes}", "leave --nodes out inside srun")
    endpoint = given.rdzv_endpoint or (job.endpoint if job is not None else None)
    rank = job.node_rank if given.node_rank is None and job is not None else given.node_rank
    if number == 1:
        if given.node_rank or given.rdzv_endpoint:
            raise UserError("--node-rank and --rdzv-endpoint are for several nodes", "give --nodes too")
        return NodePlace()
    if rank is None or endpoint is None:
        raise UserError(
            f"--nodes {number} outside Slurm needs this node's number and the address of node 0",
            "run ft selftest on every node with --node-rank I and --rdzv-endpoint HOST:PORT",
        )
    if rank >= number:
        raise UserError(f"--node-rank {rank} is not below --nodes {number}", "number the nodes from 0")
    host, _, port = endpoint.partition(":")
    if not host or (port and not port.isdecimal()):
        raise UserError(f"--rdzv-endpoint {endpoint} is not HOST:PORT", "such as node1:29400")
    return NodePlace(rank, number, host, int(port or _PORT))


def _on_all_nodes(given: argparse.Namespace) -> int:
    """Start this self-test on every node of the Slurm allocation, and return its exit code."""
    plan_of(argparse.Namespace(**{**vars(given), "nodes": None}), None, os.environ)  # all problems, before srun starts
    words = [sys.executable, "-m", "ft", *_without_nodes(sys.argv[1:])]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with subprocess.Popen(session.srun(given.nodes, os.environ, words)) as child:
        while True:
            try:
                code = child.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:  # after a Ctrl-C, srun waits for another one; SIGTERM ends all nodes at once
                child.terminate()


def _without_nodes(words: list[str]) -> list[str]:
    """Return a command line without ``--nodes``, which srun replaces."""
    kept, skip = [], False
    for word in words:
        if not skip and word != "--nodes" and not word.startswith("--nodes="):
            kept.append(word)
        skip = word == "--nodes"
    return kept
