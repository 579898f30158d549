"""Define the flags of ``ft run``, the launcher that replaces torchrun.

The flags are those of torchrun, spelled with dashes or underscores, and additional flags for fault tolerance: standbys
(warm workers that replace failed ones), fault injection, and FT-HSDP replicas (several copies of the model, each
trained by its own workers, that continue when one copy fails).
"""

import argparse

from ft.job.replicas import flags as hsdp


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to ``parser``, and the positional arguments for the training script and its own arguments."""
    _torchrun(parser.add_argument_group("as torchrun"))
    _ours(parser.add_argument_group("fault tolerance"))
    hsdp.add_flags(_Flags(parser.add_argument_group("FT-HSDP: replicas that train on without one another")))
    parser.add_argument("script", help="Python file to run on every worker; with -m a module's name")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(problems=[])


def launchers_flags() -> set[str]:
    """Return every spelling of every flag of ``ft run``."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return {spelling for action in parser._actions for spelling in action.option_strings}


def _torchrun(group) -> None:
    flag = _Flags(group)
    flag("nnodes", metavar="N", help="nodes of the run, one ft run on each (default: that of Slurm or mpirun, else 1)")
    flag(
        "node-rank",
        type=int,
        metavar="I",
        help="this node's number, 0 to N-1 (default: that of Slurm or mpirun, else 0)",
    )
    flag(
        "nproc-per-node",
        default="1",
        metavar="N|gpu|cpu|auto",
        help="workers per node; auto: one per GPU, without GPUs one per CPU core (default: 1)",
    )
    flag("rdzv-endpoint", metavar="HOST[:PORT]", help="where the control plane of node 0 listens")
    flag("master-addr", metavar="HOST", help="the host of --rdzv-endpoint")
    flag("master-port", type=int, metavar="PORT", help="the port of --rdzv-endpoint")
    flag("rdzv-id", metavar="NAME", help="name of the run (default: that of its directory)")
    flag("rdzv-backend", choices=["c10d", "static"], help="accepted for torchrun's sake; both mean the same here")
    flag("standalone", action="store_true", help="one node at a free port, as without any of the above")
    flag("local-addr", metavar="HOST", help="the address other nodes reach this one at (default: found out)")
    flag(
        "max-restarts",
        type=int,
        metavar="N",
        help="warm restarts, from the checkpoint or for a replica from the others (default: 3; 1000 for each replica)",
    )
    group.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as python -m")
    flag("no-python", action="store_true", help=argparse.SUPPRESS)


def _ours(group) -> None:
    flag = _Flags(group)
    flag("standby", type=int, default=0, metavar="N", help="standbys on this node (default: 0)")
    flag("standby-nodes", type=int, default=0, metavar="N", help="the last N nodes carry standbys only (default: 0)")
    flag(
        "control",
        metavar="tcpstore|etcd://HOST:PORT,...",
        help="what the control plane talks to agents over (default: a TCPStore of its own)",
    )
    flag(
        "topology",
        metavar="FILE",
        help="which hosts fail together, so that peer copies are kept apart: lines HOSTS rack=NAME ..., or Slurm's "
        "topology.conf (default: each node is by itself)",
    )
    flag(
        "ft-transport",
        choices=["tcp", "mpi"],
        help="what snapshots, and gradients between replicas, go over; mpi: start with mpirun --with-ft ulfm, or srun "
        "(default: the script's, else tcp)",
    )
    flag("run-dir", metavar="DIR", help="events, metrics and logs go here (default: runs/<date-time>)")
    flag(
        "inject",
        action="append",
        default=[],
        metavar="SPEC",
        help="a fault on purpose: kill@step=20:rank=3, of a replica kill@replica=1:step=20; repeatable; ft faults "
        "lists the kinds",
    )
    flag("scenario", metavar="FILE", help="a file of faults and their seed: YAML, TOML or JSON (ft faults)")
    flag("seed", type=int, metavar="N", help="seed of what faults leave open (default: the scenario's, else 0)")
    flag(
        "preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this into the warm pool too; none: import nothing there; repeatable",
    )
    group.add_argument("--quiet", action="store_true", help="only the script's output and errors")


class _Flags:
    """Adds flags to an argument group in both spellings. The help text shows only the spelling with dashes."""

    def __init__(self, group):
        self._group = group

    def __call__(self, name: str, **settings) -> None:
        target = name.replace("-", "_")
        self._group.add_argument(f"--{name}", dest=target, **settings)
        if target != name:
            hidden = {**settings, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
            self._group.add_argument(f"--{target}", dest=target, **hidden)
