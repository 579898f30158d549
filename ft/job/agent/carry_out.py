"""Creates and runs the node agent of ``ft run``: takes the resolved options and returns the exit code."""

from ft import faults as inject
from ft.base import token
from ft.base.files import needs_run_dir
from ft.job.agent.options import RunOptions
from ft.platform import network


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
    with needs_run_dir(options.run_dir):
        (options.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        if options.cluster.node_rank == 0:
            token.make(options.run_dir)

    from ft.job.agent.agent import Agent
    from ft.job.agent.components import assemble

    parts = assemble(options, port, faults)
    parts.workforce.training_since = began
    if announcement:
        parts.console.say(announcement)
    if parts.membership.is_late:
        parts.console.say(f"this node joins a run that is under way, as the spare {parts.membership.place.node}")
    return Agent(parts, first_ranks(options), options.life or 0, joined).run()


def first_ranks(options: RunOptions) -> list[int]:
    """Return the logical ranks of this node's first workers, assigned node by node as in torchrun."""
    if not options.cluster.trains:
        return []
    first = options.cluster.node_rank * options.nproc
    return list(range(first, first + options.nproc))
