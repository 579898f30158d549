"""Define the flags of ``ft run``: those of torchrun, with dashes or underscores, and flags for fault tolerance."""

import argparse

from ft.base.errors import Problem
from ft.base.quantities import count
from ft.job.replicas import flags as hsdp


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to ``parser``, and the positional arguments for the training script and its own arguments."""
    _add_torchrun_flags(parser.add_argument_group("as torchrun"))
    _add_fault_tolerance_flags(parser.add_argument_group("fault tolerance"))
    hsdp.add_flags(
        _Flags(parser.add_argument_group("FT-HSDP: replicas of the model that continue when another replica fails"))
    )
    parser.add_argument("script", help="Python file that every worker runs; with -m, the name of a module")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(problems=[])


def launchers_flags() -> set[str]:
    """Return every spelling of every flag of ``ft run``."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return {spelling for action in parser._actions for spelling in action.option_strings}


def misplaced(problem: str) -> Problem | None:
    """Return the error for a flag of ``ft run`` that was given to the trainer by mistake; None for other problems."""
    flag = problem.removeprefix("unknown flag ")
    if flag == problem or flag not in launchers_flags():
        return None
    return problem, "it is a flag of ft run: give it before the script's name"


def _add_torchrun_flags(group) -> None:
    flag = _Flags(group)
    flag(
        "nnodes",
        metavar="N",
        help="number of nodes of the run; start ft run once on each (default: the number "
        "that Slurm or mpirun gives, else 1)",
    )
    flag(
        "node-rank",
        type=int,
        metavar="I",
        help="number of this node, from 0 to N-1 (default: the number that Slurm or mpirun gives, else 0)",
    )
    flag(
        "nproc-per-node",
        default="1",
        metavar="N|gpu|cpu|auto",
        help="number of workers per node; auto: one per GPU, or one per CPU core if there is no GPU (default: 1)",
    )
    flag("rdzv-endpoint", metavar="HOST[:PORT]", help="address at which the control plane on node 0 listens")
    flag("master-addr", metavar="HOST", help="host of --rdzv-endpoint")
    flag("master-port", type=int, metavar="PORT", help="port of --rdzv-endpoint")
    flag("rdzv-id", metavar="NAME", help="name of the run (default: the name of its directory)")
    flag(
        "rdzv-backend",
        choices=["c10d", "static"],
        help="accepted for compatibility with torchrun; both values have the same effect",
    )
    flag(
        "standalone",
        action="store_true",
        help="run on one node with a free port; this is the default without the flags above",
    )
    flag(
        "local-addr",
        metavar="HOST",
        help="address at which other nodes reach this node, or name of its network interface (default: detected)",
    )
    flag(
        "max-restarts",
        type=count(0),
        metavar="N",
        help="maximum number of warm restarts, from the checkpoint or, for a replica, from the other replicas "
        "(default: 3; 1000 for each replica)",
    )
    group.add_argument("-m", "--module", action="store_true", help="run the script as a module, as python -m does")
    flag("no-python", action="store_true", help=argparse.SUPPRESS)


def _add_fault_tolerance_flags(group) -> None:
    flag = _Flags(group)
    flag(
        "data-interface",
        metavar="NAME",
        help="network interface of this node, or its address, for snapshots and the sums of replicas (default: the "
        "fastest one that NCCL_SOCKET_IFNAME names, otherwise that of --local-addr)",
    )
    flag(
        "standby",
        type=count(0),
        default=0,
        metavar="N",
        help="number of standbys (warm spare workers) on this node; with replicas, of each replica here (default: 0)",
    )
    flag(
        "standby-nodes",
        type=count(0),
        default=0,
        metavar="N",
        help="number of nodes that run only standbys: the last N nodes; with replicas, the first is of replica 0, the "
        "next of replica 1, and so on (default: 0)",
    )
    flag(
        "devices-per-node",
        type=count(0),
        metavar="N",
        help="number of devices on each node, so that no more workers than that hold a logical rank there; 0: no limit "
        "(default: the number of GPUs, or no limit if there are fewer than --nproc-per-node)",
    )
    flag(
        "control",
        metavar="tcpstore|etcd://HOST:PORT,...",
        help="what keeps the leases of the control plane and the quorum server and the journal: tcpstore: files in "
        "--run-dir, which all nodes share; etcd://...: servers of etcd, and each node has a --run-dir of its own "
        "(default: tcpstore)",
    )
    flag(
        "topology",
        metavar="FILE",
        help="file that says which hosts fail together, so that peer copies are placed apart: lines HOSTS rack=NAME "
        "..., or Slurm's topology.conf (default: every node fails independently)",
    )
    flag(
        "ft-transport",
        choices=["tcp", "mpi"],
        help="transport of snapshots and of gradients between replicas; for mpi, start with mpirun --with-ft ulfm or "
        "srun (default: the script's choice, else tcp)",
    )
    flag(
        "limits",
        metavar="FILE",
        help="file with timeouts of failure detection and recovery that replace the defaults: YAML, TOML or JSON with "
        "lines such as stall_s: 20; the same on every node",
    )
    flag(
        "suspects",
        metavar="FILE",
        help="file of devices that computed wrongly in earlier runs, written by ft diagnose silent --out FILE; those "
        "to pull are not used",
    )
    flag(
        "health",
        choices=["off", "watch", "drain"],
        default="watch",
        help="read what the node says of itself (GPUs, network ports, memory, disks, kernel log) every 30 s and record "
        "findings; drain: also give no further worker to a device or node with a finding against it (default: watch)",
    )
    flag("run-dir", metavar="DIR", help="directory for events, metrics and logs (default: runs/<date-time>)")
    flag(
        "join",
        action="store_true",
        help="join a run that is under way as a spare, although an ft run with this node's number is at work in it",
    )
    flag(
        "inject",
        action="append",
        default=[],
        metavar="SPEC",
        help="inject a fault, such as kill@step=20:rank=3, or kill@replica=1:step=20 in a run with replicas; may be "
        "repeated; ft faults lists the kinds",
    )
    flag(
        "inject-strict",
        action="store_true",
        help="end with exit code 76, instead of 0, if a fault of --inject or --scenario was not injected",
    )
    flag(
        "scenario",
        metavar="FILE",
        help="file with a list of faults and a seed: YAML, TOML or JSON; ft faults shows an example",
    )
    flag(
        "seed",
        type=int,
        metavar="N",
        help="seed of the random choices of faults (default: the scenario's seed, else 0)",
    )
    flag(
        "preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="also import this module into the warm pool; none: import nothing; may be repeated",
    )
    group.add_argument("--quiet", action="store_true", help="print only the script's output and errors")


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
