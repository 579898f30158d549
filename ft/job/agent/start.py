"""Creates and runs the node agent of ``ft run``: takes the resolved options and returns the exit code."""

from collections.abc import Sequence
from pathlib import Path

from ft import faults as inject
from ft.base import token
from ft.base.errors import UserError
from ft.base.files import needs_run_dir
from ft.job.agent.agent import Agent
from ft.job.agent.options import RunOptions
from ft.platform import election, network
from ft.platform.shared_state import keep_on_etcd


def carry_out(
    options: RunOptions,
    faults: list[inject.Fault],
    announcement: str = "",
    began: float | None = None,
    joined: str = "",
) -> int:
    """Run the agent of this node to the end of the run, and return the exit code.

    Args:
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

    agent = Agent(options, port, faults, first_ranks(options), joined, began)
    if announcement:
        agent.console.say(announcement)
    for line in _networks(options, agent.membership.place.host):
        agent.console.say(line)
    if agent.membership.is_late:
        agent.console.say(f"this node joins a run that is under way, as the spare {agent.membership.place.node}")
    return agent.run()


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
