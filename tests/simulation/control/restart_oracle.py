"""Test oracle: checks whether the injected faults explain the control plane's strong
reactions.

The control plane has these reactions to a fault, from mild to strong: no reaction; another epoch (version of the map
from logical ranks to workers) with the same workers; a hot-swap, which replaces workers by standbys; a warm restart of
all workers from the last checkpoint; the end of the run.
"""

from typing import TYPE_CHECKING

from ft.job import messages as m
from ft.job.control.history import MOST_RETURNS

if TYPE_CHECKING:
    from tests.simulation.control.cluster import Cluster

ANYTHING, HOT_SWAP, IN_PLACE, NOTHING = "anything", "hot-swap", "another epoch of the same workers", "nothing"
"""The strongest reaction that a fault may cause, from any reaction to none."""

_TOO_MUCH = {
    HOT_SWAP: (m.Restart, m.Stop),
    IN_PLACE: (m.Restart, m.Stop, m.Kill),
    NOTHING: (m.Restart, m.Stop, m.Kill, m.Close),
}
_AFTERMATH_S = 20.0
"""Virtual seconds from the end of a fault until all its consequences are detected."""


class Legitimacy:
    """Checks that the faults of one simulated run explain each of its warm restarts, and its end."""

    def __init__(self, cluster: "Cluster"):
        self._cluster = cluster
        self._excused = self._restarts = 0

    def of_restart(self, order: m.Restart) -> None:
        """Check that a fault has struck since the previous warm restart."""
        self._restarts += 1
        struck = len(self._cluster.struck)
        if not self._is_excused():
            self._cluster.checks.fail(f"warm restart {order.number} without a fault since the last one: {order.reason}")
        self._excused = struck
        self._check_lost_agents(order.reason)

    def of_stop(self, order: m.Stop) -> None:
        """Check that the faults explain the message with which the control plane ends the run."""
        text, kinds = order.message, {kind for _, kind in self._cluster.struck}
        checks, shape = self._cluster.checks, self._cluster.shape
        if "was told to end" in text:
            legitimate = "tell an agent to end" in kinds
        elif "are allowed and used up" in text:
            legitimate = self._restarts == shape.max_restarts and self._is_excused()
        elif "the nodes that are left cannot hold" in text or "before training began" in text:
            legitimate = self._room() < shape.world_size or not self._cluster.plane.state.attached
        elif "agents came within" in text or "workers were announced" in text:
            legitimate = any(agent.excuse for agent in self._cluster.agents.values())
        elif "the same error as before the warm restart" in text:
            alike = "replacements failed alike" in text and len(self._cluster.struck) > 3
            alike = alike or bool(self._cluster.poisoned)
            legitimate = alike or bool(kinds & {"raise software error", "exit with code 1", "bad start"})
        elif "times after committed step" in text:  # in a simulation a fault has caused each of these interruptions
            legitimate = len(self._cluster.struck) > MOST_RETURNS or bool(self._cluster.poisoned)
        elif not self._cluster.plane.state.attached:  # until a worker attaches, any failure ends the run
            legitimate = bool(self._cluster.struck)
        else:
            legitimate = False
        self._check_lost_agents(text)
        if not legitimate:
            checks.fail(f"the run is stopped without a reason for it: {text}")

    def _is_excused(self) -> bool:
        """Return whether a fault has struck since the last warm restart, or a fault or its consequences still last."""
        news = len(self._cluster.struck) > self._excused or bool(self._cluster.poisoned)
        return news or self._cluster.time.now < self._cluster.calm_at + _AFTERMATH_S

    def _room(self) -> int:
        """Return how many workers fit on the usable devices of nodes that the control plane has not declared lost."""
        here = [a for a in self._cluster.plane.state.agents.values() if not a.gone]
        devices = self._cluster.shape.devices or self._cluster.shape.world_size
        overdue = [sum(hold.overdue for hold in agent.held.values()) for agent in here]
        return sum(min(agent.seats + agent.standbys, devices - lost) for agent, lost in zip(here, overdue, strict=True))

    def _gone(self) -> list[str]:
        """Return the nodes that the control plane counts as lost."""
        return [node for node, agent in self._cluster.plane.state.agents.items() if agent.gone]

    def _check_lost_agents(self, text: str) -> None:
        """Check that a node was declared lost only if a fault may have kept its agent's messages away."""
        for node in self._gone():
            if not self._cluster.agents[node].excuse and not self._cluster.plane.was_cut_off:
                self._cluster.checks.fail(f"node {node} was given up, but nothing had struck its agent; then: {text}")


def check_alone(cluster: "Cluster", at_worst: str, struck: str, limit: float) -> None:
    """Check the control plane's reaction to the only fault of a run.

    Args:
        cluster: the simulated cluster.
        at_worst: the strongest reaction allowed.
        struck: description of the fault's target.
        limit: true time in seconds until which the epoch must be closed, if it is closed. A verdict on a hang may wait
            for a look at all workers, ``look_s`` more.
    """
    if at_worst == ANYTHING:
        return
    limit += cluster.plane.state.options.timeouts.look_s
    if cluster.checks.first_close > limit:
        cluster.checks.fail(f"{cluster.checks.first_close - limit:.1f} s too late, the epoch is closed for {struck}")
    for order in cluster.plane.log:
        kind = type(order).__name__
        if isinstance(order, m.Restart) and at_worst == HOT_SWAP and not cluster.shape.copies:
            continue  # without copies the loss of one worker may need the checkpoint
        is_innocent = isinstance(order, m.Kill) and f"{order.worker} (" not in struck
        if is_innocent or isinstance(order, _TOO_MUCH[at_worst]):
            cluster.checks.fail(f"a fault that may lead to {at_worst} at worst has led to {kind}; {struck}: {order}")
