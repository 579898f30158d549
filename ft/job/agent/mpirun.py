"""``ft run`` under mpirun or srun: the node's position in the job, and its MPI process for ``--ft-transport mpi``.

With that flag, snapshots travel between nodes over MPI. Workers are not MPI processes; each node has one MPI process,
the relay, which forwards their data.

The process that mpirun has started becomes the MPI process (relay) of the node; the agent runs as its child:

    mpirun -- ft run, relay -+- agent -+- warm pool
                             |         +- workers
                             +- MPI: the relays of the other nodes

Relay and agent end together, so that a node is never lost in part. If the relay dies or hangs, the agent ends too, and
the node is lost as if it had been switched off: without the relay, its workers could not send snapshots to other nodes.
If the agent is killed, the relay ends too, so that MPI on the other nodes detects the loss of the node.

When a whole host is lost, the daemon that mpirun or Slurm runs there dies too (mpi_hosts.txt of tools/experiments).
srun (--mpi=pmix --no-kill --kill-on-bad-exit=0) continues and returns as if nothing had happened. mpirun also continues
if the command that starts its daemons has returned long before (--prtemca plm_ssh_agent "ssh -f"; an ssh that ends with
its host ends the job), but at the end it waits for the lost host: the run's event log shows when the run has finished.
The host on which mpirun itself runs must not die. A lost node cannot come back into a running MPI job.
"""

import argparse
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ft.base import bounded_json
from ft.base.errors import UserError
from ft.net import mpi_relay, streams
from ft.net.streams import TRANSPORT
from ft.platform import network, processes, slurm
from ft.platform.slurm import JobPlace
from ft.platform.supervisor import END_SIGNALS

_FLAG = "--ft-transport"
_START_S = 120.0
_LEAVE_S = 5.0
_PING_S, _PONG_S = 2.0, 3 * mpi_relay.SILENT_S
_FOR_ONE_PROCESS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "PMI2_")
_START = (
    "mpirun --with-ft ulfm -n NODES --map-by ppr:1:node ft run ..., or srun --mpi=pmix --ntasks-per-node=1 ft run ..."
)


def read(environment: Mapping[str, str]) -> JobPlace | None:
    """Read this node's position from mpirun's variables, which contain no host name. Return None outside mpirun."""
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    rank, size = mpi_relay.rank_in(environment)
    return JobPlace("", size, rank, "")


def wanted(given: argparse.Namespace) -> bool:
    """Return whether ``--ft-transport mpi`` is given, as a flag of ``ft run`` or of its script.

    Raises:
        UserError: both are given, with different values.
    """
    here, there = given.ft_transport, _flag_in(given.script_args)
    if here and there and here != there:
        raise UserError(f"{_FLAG} {here} for ft run, {_FLAG} {there} for its script", "give it once")
    return (here or there) == "mpi"


def take_part(given: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> JobPlace:
    """Fork: this process becomes the node's MPI relay and never returns; the child returns and becomes the agent.

    Returns:
        the node's position in the job.

    Raises:
        UserError: MPI is not installed, was not started for this run or this number of nodes, or does not start up.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise UserError(f"{_FLAG} mpi needs Open MPI and mpi4py, which are not installed", "pip install .[mpi]")
    settings = dict(environment)
    mpi_relay.configure(settings)
    rank, size = mpi_relay.rank_in(settings)
    step = slurm.read(settings) if "OMPI_COMM_WORLD_RANK" not in settings else None
    wanted_nodes = given.nnodes or (str(step.nnodes) if step else str(size))
    if wanted_nodes != str(size):
        raise UserError(f"a run on {wanted_nodes} nodes, but MPI knows {size} process(es)", _START)
    folder = Path(tempfile.mkdtemp(prefix="ft-mpi-"))
    from ft.net.mpi_relay import listen

    listener = listen(folder)
    ours, theirs = socket.socketpair()
    relay, agent = os.getpid(), os.fork()
    if agent:
        ours.close()
        os.environ.update(settings)
        _relay(agent, folder, listener, theirs)
    processes.die_with_parent(signal.SIGKILL)
    if os.getppid() != relay:
        os._exit(1)
    os.setsid()  # signals for mpirun's processes reach only the relay, which forwards them to the agent once
    listener.close()
    theirs.close()
    for name in [name for name in os.environ if name.startswith(_FOR_ONE_PROCESS)]:
        del os.environ[name]  # with these variables, any process that calls MPI_Init would act as the node's relay
    os.environ.update({TRANSPORT: "mpi", streams.FOLDER: str(folder), streams.RANK: str(rank)})
    agreed = _await_relay(ours)
    threading.Thread(target=_watch, args=(relay, folder), name="ft-mpi-watch", daemon=True).start()
    return step or agreed


def _flag_in(arguments: Sequence[str]) -> str | None:
    for index, text in enumerate(arguments):
        if text == _FLAG and index + 1 < len(arguments):
            return arguments[index + 1]
        if text.startswith(f"{_FLAG}="):
            return text.partition("=")[2]
    return None


# --- the agent's side -------------------------------------------------------------------------------------------------


def _await_relay(ours: socket.socket) -> JobPlace:
    """Wait until the relay has sent the node's position, which shows that MPI has started on all nodes.

    Raises:
        UserError: MPI has not started in time, or the relay has ended.
    """
    with ours:
        ready, _, _ = select.select([ours], [], [], _START_S)
        text = ours.makefile().readline() if ready else ""
    if not ready:
        raise UserError(f"MPI has not come up on all nodes within {_START_S:g} s", _START)
    if not text:
        raise UserError("this node's MPI process has ended at its start", "its own message is above")
    return JobPlace(**bounded_json.loads(text))


def _watch(relay: int, folder: Path) -> None:
    """Kill the relay when it does not answer any more. This process, the agent, is the relay's child and dies too."""
    while streams.answers(folder, _PONG_S):
        time.sleep(_PING_S)
    if os.getppid() == relay:
        sys.stderr.write(f"the MPI process of this node has not answered for {_PONG_S:g} s: the node gives itself up\n")
        sys.stderr.flush()
        processes.send(relay, signal.SIGKILL)


# --- the relay's side -------------------------------------------------------------------------------------------------


def _relay(agent: int, folder: Path, listener: socket.socket, answer: socket.socket) -> NoReturn:
    """Be the node's relay until the agent ends, and then exit as the agent did.

    Args:
        folder: folder of the relay's socket, which is removed at the end.
        listener: socket on which workers connect.
    """
    processes.set_name("ft-mpi")
    for signum in END_SIGNALS:
        signal.signal(signum, lambda number, _: processes.send(agent, number))
    try:
        code, world = _relay_until_end(agent, folder, listener, answer)
    except Exception as error:  # an exception from MPI: without MPI, this node is of no use to the others
        sys.stderr.write(f"the MPI process of this node fails: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        answer.close()
        code, world = -signal.SIGKILL, None
    shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        # MPI detects a death only if this process is killed; the kernel then kills the agent too, if it is alive
        os.kill(os.getpid(), signal.SIGKILL)
    world.leave(_LEAVE_S)
    os._exit(code)


def _relay_until_end(agent: int, folder: Path, listener: socket.socket, answer: socket.socket) -> tuple[int, Any]:
    """Relay until the agent ends. Return (the agent's exit code, negative for a signal; the MPI world to leave)."""
    from ft.net.mpi_relay import Relay

    world = mpi_relay.World()
    with answer:
        answer.sendall(json.dumps(asdict(_agree(world))).encode() + b"\n")
    codes: list[int] = []

    def ended() -> bool:
        pid, status = os.waitpid(agent, os.WNOHANG)
        codes.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(codes)

    Relay(world, folder, listener).run(ended)
    return codes[0], world


def _agree(world: mpi_relay.World) -> JobPlace:
    """Agree on the nodes' rendezvous address and the run's name: all nodes use the values of rank 0."""
    mine = [socket.gethostname(), network.free_port(), time.strftime("%Y-%m-%d_%H-%M-%S")]
    all_nodes = [bounded_json.loads(text) for text in world.share(json.dumps(mine).encode())]
    host, port, job = all_nodes[0]
    if {theirs for theirs, *_ in all_nodes} == {host}:
        host = "127.0.0.1"
    return JobPlace(job, world.size, world.rank, f"{host}:{port}")
