"""Resolves the options of ``ft run`` from its command line and from the environment of Slurm or mpirun.

All errors in the input are collected and reported together.
"""

import argparse
import importlib.util
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft.base import files, token
from ft.base.errors import Problems, UserError
from ft.base.quantities import whole
from ft.job.agent import devices, mpirun
from ft.job.agent.devices import LeftOut
from ft.job.control.timeouts import BEHIND_ETCD, Timeouts, timeouts_of
from ft.platform import election, network, shared_state, slurm
from ft.platform.slurm import JobPlace, read_topology

_DEFAULT_PORT, _DEFAULT_RESTARTS = 29400, 3
_MOST_NODES, _MOST_WORKERS = 100_000, 4096
OFF, WATCH, DRAIN = "off", "watch", "drain"
"""Values of ``--health``."""


@dataclass(frozen=True)
class Script:
    """The script that every worker runs.

    Attributes:
        target: path of a file or, with ``is_module``, name of a module.
        is_module: whether ``target`` is run like ``python -m``.
        args: arguments of the script.
    """

    target: str
    is_module: bool
    args: list[str]
    preload: list[str] = field(default_factory=list)
    """Further modules that the warm pool (the process from which workers are forked) imports.

    ["none"]: the pool imports no modules at all.
    """


@dataclass(frozen=True)
class Cluster:
    """The nodes of a run, and this node's position among them.

    Attributes:
        nnodes: number of all nodes.
        node_rank: number of this node, from 0.
        standby_nodes: number of nodes that run standbys only; these nodes have the highest numbers.
        host: host on which the control plane listens.
        port: port on which the control plane listens; 0 means any free port (possible on node 0 only).
        in_folder: whether the other nodes find the control plane only through its address file in the run's directory,
            and not at host and port.
    """

    nnodes: int
    node_rank: int
    standby_nodes: int
    host: str
    port: int
    in_folder: bool = False

    @property
    def trains(self) -> bool:
        """Return whether this node's workers hold logical ranks from the start."""
        return self.node_rank < self.training_nodes

    @property
    def training_nodes(self) -> int:
        return self.nnodes - self.standby_nodes


@dataclass(frozen=True)
class RunOptions:
    """The options of one ``ft run``, valid and complete.

    Attributes:
        script: the training script.
        cluster: the nodes.
        nproc: number of workers with a logical rank on each training node.
        standby: number of standbys on this node, in addition to those workers.
        run_dir: the run's directory, for logs, the event log and the control plane's files.
        run_id: id of the run.
        max_restarts: maximum number of warm restarts.
        quiet: whether only the output of workers and errors are printed.
        local_addr: address at which other nodes reach this node, None to detect it.
        domains: kind -> name of this node's failure domains, such as "rack" -> "r1".
        devices: number of devices on each node; None: the number of GPUs that torch finds.
        replicas: number of replicas of the model that train together; this run is one of them.
        reorders: whether the other replicas compute the part of a lost one (SPARe).
    """

    script: Script
    cluster: Cluster
    nproc: int
    standby: int
    run_dir: Path
    run_id: str
    max_restarts: int
    quiet: bool = False
    local_addr: str | None = None
    control: str | None = None
    """Servers that keep the run's shared state, as ``etcd://HOST:PORT``. None: the run's directory keeps it."""
    domains: dict[str, str] = field(default_factory=dict)
    hot_swap: bool = True
    """Whether standbys replace lost workers in the running job. False: every failure leads to a warm restart."""
    devices: int | None = None
    replicas: int = 1
    reorders: bool = False
    life: int | None = None
    """Number of restarts so far, set for a replica of FT-HSDP, whose supervisor starts new agents for every restart.

    None: the agent belongs to the first start of the run, or joins a run that is under way and offers standbys only.
    """
    left_out: LeftOut = field(default_factory=LeftOut)
    """Devices of this node that computed wrongly in earlier runs (``--suspects``)."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """The timeouts of the run: the defaults, changed by ``--control etcd`` and ``--limits``."""
    joins: bool = False
    """Whether this node may join a run in which an ``ft run`` with its number is at work."""
    data_addr: str | None = None
    """Address at which the workers of other nodes reach those of this node, None for that of the agent."""
    health: str = WATCH
    """What follows from what a node says of itself: "off" (it is not read), "watch" or "drain"."""

    @property
    def world_size(self) -> int:
        return self.nproc * self.cluster.training_nodes

    @property
    def has_standbys(self) -> bool:
        """Return whether any node of the run has a standby from the start."""
        return self.standby > 0 or self.cluster.standby_nodes > 0

    @property
    def standby_flags(self) -> list[str]:
        """Return the flags that ask for standbys, as the user gives them."""
        given = {"--standby": self.standby, "--standby-nodes": self.cluster.standby_nodes}
        return [f"{flag} {number}" for flag, number in given.items() if number]

    @property
    def standbys_here(self) -> int:
        """Return the number of standbys on this node. A standby node has at least as many as a training node has
        workers, and none if the node must not be used.
        """
        if self.left_out.node:
            return 0
        return self.standby if self.cluster.trains else max(self.nproc, self.standby)


def resolve(
    given: argparse.Namespace, environment: Mapping[str, str], job: JobPlace | None = None, lease: str = ""
) -> RunOptions:
    """Check the flags, and fill in defaults.

    Args:
        job: the Slurm or MPI job that this node is part of; default: read from the environment.
        lease: folder, relative to the run's directory, with the control plane's lease, which shows whether the run is
            under way; default: the run's directory itself.

    Raises:
        UserError: the flags are wrong or contradict each other.
    """
    problems = Problems()
    problems.add(given.problems)
    cluster: Cluster | None = None
    script: Script | None = None
    run_dir: Path | None = None
    nproc = control = data_addr = None
    domains, timeouts = {}, Timeouts()
    if given.no_python:
        problems.add([("--no-python is not supported: workers are forked from Python", "run a Python script")])
    with problems:
        if job is None and not given.standalone:
            job = mpirun.read(environment) or slurm.read(environment)
        cluster = _cluster(given, job)
    with problems:
        nproc = _nproc(given.nproc_per_node)
    with problems:
        script = script_of(given)
    if given.local_addr and not re.fullmatch(r"[\w.:%-]{1,253}", given.local_addr):
        problems.add(
            [(f"--local-addr {given.local_addr[:40]!r} is no host name and no address", "give one of this node")]
        )
    with problems:
        several = cluster is not None and cluster.nnodes > 1
        data_addr = _data_address(given.data_interface, environment if several else {})
    with problems:
        token.check(environment)
    with problems:
        control = _control(given.control, cluster, environment)
    with problems:
        timeouts = timeouts_of(given.limits, {} if given.control in (None, "tcpstore") else BEHIND_ETCD)
    if cluster is not None:
        with problems:
            run_dir = _run_dir(given, job, cluster, lease)
        with problems:
            domains = _domains(given, cluster, environment)
    left_out = LeftOut()
    if given.suspects is not None and cluster is not None and nproc is not None:
        with problems:
            count = count_gpus() if given.devices_per_node is None else given.devices_per_node
            left_out = devices.left_out(given.suspects, nproc, cluster.trains, count, environment)
    problems.refuse()
    assert script and cluster and nproc and run_dir, "what is missing is a problem"
    return RunOptions(
        script=script,
        cluster=cluster,
        nproc=nproc,
        standby=given.standby,
        run_dir=run_dir,
        run_id=given.rdzv_id or run_dir.name,
        max_restarts=_DEFAULT_RESTARTS if given.max_restarts is None else given.max_restarts,
        quiet=given.quiet,
        local_addr=network.interfaces().get(given.local_addr, given.local_addr),
        data_addr=data_addr,
        control=control,
        domains=domains,
        timeouts=timeouts,
        devices=given.devices_per_node,
        left_out=left_out,
        joins=given.join,
        health=given.health,
    )


def _data_address(given: str | None, environment: Mapping[str, str]) -> str | None:
    if given is None:
        return network.bulk_interface(environment)[1]
    own = network.interfaces()
    if given not in own and given not in own.values():
        here = ", ".join(f"{network.said_rate(name)} {address}" for name, address in own.items())
        raise UserError(f"--data-interface {given[:40]!r} is no interface with an address here", f"give one of {here}")
    return own.get(given, given)


def _control(text: str | None, cluster: Cluster | None, environment: Mapping[str, str]) -> str | None:
    if text in (None, "tcpstore"):
        return None
    if not text.startswith(shared_state.SCHEME) or not text.removeprefix(shared_state.SCHEME).strip("/"):
        raise UserError(f"--control {text} is neither tcpstore nor etcd://HOST:PORT[,HOST:PORT...]", "give one of them")
    shared_state.require(text)
    if cluster is not None and cluster.nnodes > 1 and not environment.get(token.VARIABLE):
        raise UserError(
            f"--control etcd:// on several nodes needs {token.VARIABLE}: they may share no folder with the run's token",
            f"set {token.VARIABLE} to the same value on all nodes, and to another one for each run, as of "
            "`openssl rand -hex 32`",
        )
    return text


def _cluster(given: argparse.Namespace, job: JobPlace | None) -> Cluster:
    nnodes = _nnodes(given.nnodes, job)
    if given.standalone and nnodes != 1:
        raise UserError(f"--standalone is for one node, --nnodes is {nnodes}", "drop one of the two")
    node_rank = given.node_rank
    if node_rank is None:
        if job is None and nnodes > 1:
            raise UserError(f"--nnodes {nnodes} needs this node's number", "add --node-rank I, from 0 on")
        node_rank = job.node_rank if job else 0
    if not 0 <= node_rank < nnodes:
        raise UserError(
            f"--node-rank {node_rank} is not between 0 and {nnodes - 1} (--nnodes {nnodes})", "number from 0"
        )
    standby_nodes = given.standby_nodes
    if standby_nodes >= nnodes:
        raise UserError(
            f"--standby-nodes {standby_nodes} leaves none of {nnodes} nodes to train on", "give fewer than --nnodes"
        )
    host, port = _endpoint(given, job, nnodes)
    return Cluster(nnodes, node_rank, standby_nodes, host, port)


def _nnodes(text: str | None, job: JobPlace | None) -> int:
    if text is None and job is not None and job.nnodes > 1 and not job.in_step:
        raise UserError(
            f"this is one process for the {job.nnodes} nodes of Slurm job {job.job}; ft run is one per node",
            "start it with: srun --ntasks-per-node=1 ft run ... (or use this node alone: --standalone)",
        )
    if text is None:
        return job.nnodes if job else 1
    if ":" in text:
        raise UserError(
            f"--nnodes {text}: a run has a fixed number of nodes here", "give one number; spare nodes: --standby-nodes"
        )
    try:
        return whole(1, _MOST_NODES)(text)
    except ValueError as error:
        raise UserError(
            f"--nnodes {text[:40]} is no number from 1 to {_MOST_NODES:,}", "give the number of nodes"
        ) from error


def _domains(given: argparse.Namespace, cluster: Cluster, environment: Mapping[str, str]) -> dict[str, str]:
    """Return this node's failure domains, looked up by its Slurm name, host name or address."""
    if given.topology is None:
        return {}
    host = socket.gethostname()
    names = [environment.get("SLURMD_NODENAME", ""), host, host.split(".")[0], given.local_addr or ""]
    return read_topology(given.topology).find(names, f"n{cluster.node_rank}")[1]


def _endpoint(given: argparse.Namespace, job: JobPlace | None, nnodes: int) -> tuple[str, int]:
    """Return (host, port) of the control plane. Port 0 means any free port."""
    text = given.rdzv_endpoint
    if text and (given.master_addr or given.master_port):
        raise UserError("--rdzv-endpoint and --master-addr/--master-port say the same thing", "give one of them")
    if given.standalone and text:
        raise UserError(f"--standalone chooses its own endpoint, --rdzv-endpoint is {text}", "drop one of the two")
    if not text and given.master_addr:
        return given.master_addr, _port(str(given.master_port or _DEFAULT_PORT), "--master-port")
    if not text and job is not None and nnodes > 1:
        text = job.endpoint
    if not text:
        if nnodes > 1:
            raise UserError(f"{nnodes} nodes need a place to meet", "add --rdzv-endpoint HOST:PORT with node 0's host")
        return "127.0.0.1", _port(str(given.master_port), "--master-port") if given.master_port else 0
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(_DEFAULT_PORT)
    if not host:
        raise UserError(f"--rdzv-endpoint {text} names no host", "give HOST:PORT")
    number = _port(port, "--rdzv-endpoint")
    if number == 0 and nnodes > 1:
        raise UserError(f"--rdzv-endpoint {text}: {nnodes} nodes cannot meet at any free port", "give a port")
    return host, number


def _port(text: str, flag: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise UserError(f"{flag}: {text[:40]} is no port", "give a number from 1 to 65535")
    return int(text)


def _nproc(text: str) -> int:
    if text not in ("gpu", "cpu", "auto"):
        try:
            return whole(1, _MOST_WORKERS)(text)
        except ValueError as error:
            problem = f"--nproc-per-node {text[:40]} is neither a number from 1 to {_MOST_WORKERS} nor gpu, cpu or auto"
            raise UserError(problem, "give one of them") from error
    gpus = count_gpus() if text != "cpu" else 0
    if text == "gpu" and gpus == 0:
        raise UserError("--nproc-per-node gpu: this node has no GPU that torch can use", "give a number, or cpu")
    return gpus or os.cpu_count() or 1


def count_gpus() -> int:
    """Return the number of GPUs that torch can use. Without a GPU device file, torch is not imported."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def script_of(given: argparse.Namespace) -> Script | None:
    """Return the script that the workers run, None if the command line names no script (the parser reports that).

    Raises:
        UserError: the script or module does not exist, or --preload contradicts itself.
    """
    if given.script is None:
        return None
    if given.module:
        _find_module(given.script)
    elif not Path(given.script).is_file():
        there = "is a folder" if Path(given.script).is_dir() else f"does not exist in {Path.cwd()}"
        raise UserError(f"the script {given.script} {there}", "check the path; a module needs -m")
    preload = [name for text in given.preload for name in text.split(",") if name]
    for name in preload:
        if name != "none":
            _find_module(name)
    if "none" in preload and len(preload) > 1:
        others = ", ".join(name for name in preload if name != "none")
        raise UserError(f"--preload has none beside {others}", "drop none, or the modules")
    return Script(given.script, given.module, given.script_args, preload)


def _find_module(name: str) -> None:
    """Raise an error if ``python -m name`` would not find the package or module. Nothing is imported."""
    top = name.partition(".")[0]
    sys.path.insert(0, os.getcwd())  # Python does the same for -m
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None:
        raise UserError(f"there is no module {top[:99]}", "check its name; the path of a script goes without -m")


def _run_dir(given: argparse.Namespace, job: JobPlace | None, cluster: Cluster, lease: str) -> Path:
    if given.run_dir:
        path = Path(given.run_dir)
    elif name := given.rdzv_id or (job and job.job):
        path = Path("runs") / name
    elif cluster.nnodes == 1:
        path = Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S")
    else:
        raise UserError(f"{cluster.nnodes} nodes need to agree on the run's directory", "add --run-dir DIR to each")
    path = path.absolute()
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"--run-dir {path} is not a directory", "choose another one")
        problem = files.why_unsafe(path)
    except (OSError, ValueError) as error:
        raise UserError(f"the run's directory cannot be {str(path)[:99]}: {error}", "choose --run-dir") from error
    if problem:
        raise UserError(
            f"--run-dir {path} is not safe from other users: {problem}", "choose a new directory of your own"
        )
    if cluster.node_rank == 0 and (path / "events.jsonl").exists() and not election.is_kept(path / lease):
        raise UserError(f"{path} holds the events of an earlier run", "choose another --run-dir, or remove that one")
    return path
