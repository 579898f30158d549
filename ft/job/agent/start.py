"""Creates and runs the node agent of ``ft run``: takes the resolved options and returns the exit code."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft import faults as inject
from ft.base import token
from ft.base.errors import UserError
from ft.base.files import needs_run_dir
from ft.job.agent.agent import Agent
from ft.job.agent.announcements import RecoveryNews, Room
from ft.job.agent.console import Console
from ft.job.agent.control_plane import ControlPlaneSupervisor, Sidecar
from ft.job.agent.devices import Devices
from ft.job.agent.environment import Masters, NodeContext
from ft.job.agent.faults import AgentFaults
from ft.job.agent.health import HEALTH_ROOT, HealthWatch
from ft.job.agent.membership import Membership, claim_name
from ft.job.agent.options import RunOptions, count_gpus
from ft.job.agent.pool import WarmPool
from ft.job.agent.uplink import Uplink
from ft.job.agent.workforce import WorkerListener, Workforce, listen
from ft.job.control.state import Options as ControlOptions
from ft.job.control.timeouts import Timeouts
from ft.net.codec import to_json
from ft.platform import election, network
from ft.platform.health.reader import Reader, of_this_node
from ft.platform.shared_state import keep_on_etcd
from ft.platform.supervisor import Supervisor


@dataclass
class Components:
    """The components of one agent, connected to each other but not started."""

    membership: Membership
    supervisor: Supervisor
    worker_listener: WorkerListener
    masters: Masters
    console: Console
    pool: WarmPool
    uplink: Uplink
    workforce: Workforce
    recoveries: RecoveryNews
    room: Room
    control_supervisor: ControlPlaneSupervisor
    faults: AgentFaults
    timeouts: Timeouts
    devices: Devices
    health: HealthWatch


def assemble(options: RunOptions, port: int, faults: list[inject.Fault]) -> Components:
    """Create the components for a run whose control plane listens on ``port``.

    Raises:
        UserError: the control plane's host cannot be reached, the run's directory cannot be written, or this node's
            ft run is at work already.
    """
    cluster, supervisor, timeouts = options.cluster, Supervisor(), options.timeouts
    begins = cluster.node_rank == 0
    console = Console(options.quiet)
    endpoint = f"tcp://{cluster.host}:{port}" if cluster.nnodes > 1 and not cluster.in_folder else ""
    uplink = Uplink(options.run_dir, endpoint, supervisor.wake, timeouts, cluster.node_rank)
    pool_log = options.run_dir / "logs" / f"n{cluster.node_rank}.pool.log"
    pool = WarmPool(supervisor, options.script, pool_log, timeouts.stuck_s)
    name, listener = listen()
    place = _place(options, port, name, faults)
    workforce = Workforce(pool, place, uplink.post, supervisor.unwatch, timeouts)
    sidecar = Sidecar(
        supervisor, options.run_dir, _channel_address(options, port, place.host), _settings(options, len(faults))
    )
    recoveries = RecoveryNews(options.run_dir / "events.jsonl" if begins else None, console.show)
    given = options.devices
    devices = Devices(
        count_gpus if given is None else lambda: given, options.nproc, supervisor.wake, left_out=options.left_out
    )
    return Components(
        membership=Membership(place, devices),
        supervisor=supervisor,
        worker_listener=WorkerListener(listener, supervisor, workforce),
        masters=Masters(place, uplink),
        console=console,
        pool=pool,
        uplink=uplink,
        workforce=workforce,
        recoveries=recoveries,
        room=Room(options.run_dir, console.complain),
        control_supervisor=ControlPlaneSupervisor(
            options.run_dir, cluster.node_rank, sidecar, timeouts, uplink, console, recoveries
        ),
        faults=AgentFaults(_own(faults, place), place.node, str(options.run_dir), uplink.record),
        timeouts=timeouts,
        devices=devices,
        health=HealthWatch(options.health, _reader(options, place.node), devices, uplink.post, console.complain),
    )


def _reader(options: RunOptions, node: str) -> Callable[[], Reader]:
    root = os.environ.get(HEALTH_ROOT)
    return lambda: of_this_node(node, Path(root) if root else None, [options.run_dir])


def _own(faults: list[inject.Fault], place: NodeContext) -> list[inject.Fault]:
    """Address this node's planned faults to this agent.

    If a replica of FT-HSDP is restarted with new agents, the agent's name differs from the node's first name.
    """
    asked = f"n{place.options.cluster.node_rank}" if place.options.life else place.node
    return [replace(fault, node=place.node) if fault.node == asked else fault for fault in faults]


def _channel_address(options: RunOptions, port: int, own_host: str) -> str:
    """Return the address at which a control plane on this node would be reached."""
    cluster = options.cluster
    return f"tcp://{cluster.host}:{port}" if cluster.node_rank == 0 else f"tcp://{own_host}:0"


def _place(options: RunOptions, port: int, agent_socket: str, faults: list[inject.Fault]) -> NodeContext:
    cluster = options.cluster
    with needs_run_dir(options.run_dir):
        # the launcher of a replica of FT-HSDP has looked already, and starts agents again and again
        joins = options.joins or options.life is not None
        name = claim_name(options.run_dir, cluster.node_rank, joins)
    host = options.local_addr or network.own_address(cluster.host, port, cluster.node_rank == 0)
    return NodeContext(options, name, host, agent_socket, _write(faults, options.run_dir, name))


def _write(faults: list[inject.Fault], run_dir: Path, node: str) -> str:
    """Write the planned faults to a file for the workers of ``node``. Return its path, "" if no faults are planned."""
    if not faults:
        return ""
    path = run_dir / f"faults.{node}.json"
    try:
        inject.write(path, faults)
    except OSError as error:
        raise UserError(f"the planned faults cannot be written: {error}", "choose --run-dir") from error
    return str(path)


def _settings(options: RunOptions, faults: int) -> dict[str, Any]:
    cluster = options.cluster
    # a replica that starts again does not wait for its standby nodes: one of them may have moved to another replica
    waits_for_all = not options.life
    settings = ControlOptions(
        cluster.nnodes if waits_for_all else cluster.training_nodes,
        counts_standby_nodes=waits_for_all,
        faults=faults,
        command=[options.script.target, *options.script.args],
        **{name: getattr(options, name) for name in _SHARED},
    )
    values: dict[str, Any] = to_json(settings)
    return values


_SHARED = ("world_size", "max_restarts", "hot_swap", "replicas", "reorders", "timeouts")
"""Options of the run that the control plane has under the same names."""


def carry_out(
    options: RunOptions,
    faults: list[inject.Fault],
    announcement: str = "",
    began: float | None = None,
    joined: str = "",
) -> int:
    """Run the agent of this node to the end of the run, and return the exit code.

    Args:
        options: the resolved options.
        faults: all planned faults of the run.
        announcement: message to print at the start.
        began: wall-clock time at which training first began, if that was before this agent's start; injection times of
            planned faults are relative to it.
        joined: message to print once the first snapshots of all workers have reached their peers.

    Raises:
        UserError: the options are not usable; nothing has been started.
    """
    port = options.cluster.port or network.free_port(options.cluster.host)
    if options.cluster.node_rank == 0:
        network.check_port(options.cluster.host, port)
    make_run_dir(options, makes_token=options.cluster.node_rank == 0)

    parts = assemble(options, port, faults)
    parts.workforce.training_since = began
    if announcement:
        parts.console.say(announcement)
    for line in _networks(options, parts.membership.place.host):
        parts.console.say(line)
    if parts.membership.is_late:
        parts.console.say(f"this node joins a run that is under way, as the spare {parts.membership.place.node}")
    return Agent(parts, first_ranks(options), options.life or 0, joined).run()


def _networks(options: RunOptions, host: str) -> list[str]:
    """Return lines about the networks of a run of several nodes: which interface carries what, at which rate."""
    if options.cluster.nnodes == 1 and options.data_addr is None:
        return []
    own = network.interfaces()
    names = {address: network.said_rate(name) for name, address in own.items()}
    data = options.data_addr or host
    lines = [
        f"networks of node {options.cluster.node_rank}: control over {names.get(host, host)}, snapshots and sums of "
        f"replicas over {names.get(data, data)}"
    ]
    if quick := network.faster(data, own):
        what = ", ".join(f"{names[own[name]]} {own[name]}" for name in quick[:4])
        lines.append(f"faster here: {what}; --data-interface NAME takes one, if the other nodes reach its address")
    return lines


def make_run_dir(options: RunOptions, makes_token: bool, parts: Sequence[Path] = (), lease: str = "") -> None:
    """Make the run's folders on this node, its token, and its shared state if that is on etcd.

    Args:
        options: the resolved options.
        makes_token: whether this node makes the run's token if there is none.
        parts: folders of the run's replicas.
        lease: folder, relative to the run's, with the lease that shows whether the run is under way.

    Raises:
        UserError: a folder cannot be written, etcd does not answer, or it holds an earlier run of this name.
    """
    run_dir, cluster = options.run_dir, options.cluster
    with needs_run_dir(run_dir):
        for folder in (run_dir, *parts):
            folder.mkdir(0o755, parents=True, exist_ok=True)
            (folder / "logs").mkdir(0o755, exist_ok=True)
        if makes_token:
            token.make(run_dir)
        if options.control is None:
            return
        root = keep_on_etcd(run_dir, options.control, options.run_id, token.find(run_dir, 0.0))
        if cluster.node_rank or options.joins or election.newest(run_dir / lease) < 0:
            return
    if not election.is_kept(run_dir / lease):
        raise UserError(
            f"etcd holds an earlier run with the name {options.run_id}",
            f"choose another --rdzv-id or --run-dir, or remove that one: etcdctl del --prefix {root}",
        )


def first_ranks(options: RunOptions) -> list[int]:
    """Return the logical ranks of this node's first workers, assigned node by node as in torchrun."""
    if not options.cluster.trains:
        return []
    first = options.cluster.node_rank * options.nproc
    return list(range(first, first + options.nproc))
