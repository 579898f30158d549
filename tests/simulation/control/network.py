"""Model of the connection between one agent (the supervisor of a node) and the control plane.

The agent numbers its reports and keeps each one until the control plane has acknowledged the report. The control
plane's orders are a numbered log that the agent follows. Within one connection, reports and orders arrive in sequence.
A broken connection loses the messages in transit. The next connection starts by sending all kept reports, which repeats
the reports that arrived without an acknowledgement. Heartbeats are not numbered, and a lost heartbeat is not repeated.
"""

from collections import deque
from typing import TYPE_CHECKING, Any

from ft.job.messages import AgentBeat

if TYPE_CHECKING:
    from tests.simulation.control.agent import Agent
    from tests.simulation.control.cluster import Cluster

_LATENCY_S, _RETRY_S, _LOST_ANSWERS = (0.0005, 0.01), (0.1, 0.4), 0.1


class Link:
    """The connection of one agent, from the agent's start to its end. Each direction breaks and reconnects on its own.

    Attributes:
        position: number of orders that the agent has received.
        contact_at: true time in seconds at which the control plane last answered.
    """

    def __init__(self, cluster: "Cluster", agent: "Agent"):
        self._cluster, self._agent = cluster, agent
        self._kept: deque[tuple[int, Any]] = deque()
        self._number = self._sent = self.position = 0  # last report; orders sent; orders received
        self._up = self._down = 0  # numbers of the current connections; a message of an earlier one is lost
        self._up_works = self._down_works = True
        self._last_up = self._last_down = 0.0
        self.contact_at = cluster.time.now

    # --- reports -----------------------------------------------------------------------------------------------------

    def post(self, report: Any) -> None:
        """Send a report; unless it is a heartbeat, keep it until it is acknowledged."""
        if isinstance(report, AgentBeat):
            if self._up_works:
                self._send(0, report)
            return
        self._number += 1
        self._kept.append((self._number, report))
        if self._up_works:
            self._send(self._number, report)

    def taken(self, number: int) -> None:
        """Handle an acknowledgement, which may be lost: the journal has every report up to ``number``."""
        if self._cluster.rng.random() < _LOST_ANSWERS:
            return
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def _send(self, number: int, report: Any) -> None:
        self._last_up = max(self._cluster.time.now + self._latency(), self._last_up)
        self._cluster.time.after(self._last_up - self._cluster.time.now, self._arrives, self._up, number, report)

    def _arrives(self, connection: int, number: int, report: Any) -> None:
        if connection != self._up:
            return
        if not self._passes("up"):
            self._break_up()
            return
        self._cluster.plane.hear(self, self._agent.node, number, report)
        if self._passes("down"):  # the control plane's answer arrives at the agent
            self.contact_at = self._cluster.time.now

    def _break_up(self) -> None:
        self._up, self._up_works = self._up + 1, False
        self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_up)

    def _connect_up(self) -> None:
        if not self._agent.alive or self._up_works:
            return
        if not self._passes("up"):
            self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_up)
            return
        self._up_works = True
        for number, report in self._kept:
            self._send(number, report)

    # --- orders ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send the orders that the agent has not received."""
        log, now = self._cluster.plane.log, self._cluster.time.now
        while self._down_works and self._sent < len(log):
            self._last_down = max(now + self._latency(), self._last_down)
            self._cluster.time.after(self._last_down - now, self._delivers, self._down, self._sent, log[self._sent])
            self._sent += 1

    def _delivers(self, connection: int, number: int, order: Any) -> None:
        if connection != self._down:
            return
        if not self._cluster.can_talk(self._agent.host, "down"):
            self._break_down()
            return
        self.position = number + 1
        self._agent.when_awake(self._agent.obey, order)

    def _break_down(self) -> None:
        self._down, self._down_works = self._down + 1, False
        self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_down)

    def _connect_down(self) -> None:
        if not self._agent.alive or self._down_works:
            return
        if not self._passes("down"):
            self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_down)
            return
        self._down_works, self._sent = True, self.position
        self.pump()

    # --- both directions ---------------------------------------------------------------------------------------------

    def control_ended(self) -> None:
        """Break both directions, because the control plane's process has ended."""
        if self._up_works:
            self._break_up()
        if self._down_works:
            self._break_down()

    def _passes(self, direction: str) -> bool:
        """Return whether a message passes now, "up" to the control plane or "down" to the agent."""
        return self._cluster.plane.is_up and self._cluster.can_talk(self._agent.host, direction)

    def _latency(self) -> float:
        return self._cluster.rng.uniform(*_LATENCY_S) + self._agent.host.lag_s(self._cluster.time.now)
