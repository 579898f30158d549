"""Every timeout of the fault path, in one table."""

from dataclasses import dataclass, replace
from itertools import pairwise

from ft.errors import UserError


@dataclass(frozen=True)
class Timeouts:
    """All in seconds.

    Attributes:
        beat_s: between two heartbeats of a worker.
        agent_beat_s: between two of an agent.
        silent_s: without a heartbeat a worker counts as hung.
        stall_s: computing for longer, while others wait for it, a worker counts as hung; grows with the step time.
        start_s: allowance in place of stall_s until the first step has ended: caches, compilation.
        suspicion_s: a connection was lost: so long the death behind it has to be seen before the connection is blamed.
        collective_s: all wait and nobody computes: connections are at fault; grows with the step time.
        agent_lost_s: without a heartbeat of its agent a node counts as lost.
        verdict_s: a worker whose connection failed waits so long for the verdict.
        drain_s: to leave a closed epoch; grows with the step time.
        assemble_s: for a joiner to be ready to connect.
        repair_s: to rebuild groups and restore state.
        join_s: for all agents and workers to come at the start.
    """

    beat_s: float = 0.1
    agent_beat_s: float = 0.25
    silent_s: float = 1.0
    stall_s: float = 2.0
    start_s: float = 300.0
    suspicion_s: float = 0.3
    collective_s: float = 5.0
    agent_lost_s: float = 3.0
    verdict_s: float = 20.0
    drain_s: float = 5.0
    assemble_s: float = 120.0
    repair_s: float = 60.0
    join_s: float = 600.0

    def check(self) -> None:
        """Raises ``UserError`` where a timeout does not fit those it has to be longer than."""
        ladder = ("beat_s", "silent_s", "agent_lost_s", "drain_s", "verdict_s", "repair_s", "join_s")
        for shorter, longer in pairwise(ladder):
            if getattr(self, shorter) > getattr(self, longer):
                pair = f"{shorter} = {getattr(self, shorter):g} s and {longer} = {getattr(self, longer):g} s"
                raise UserError(f"timeouts {pair} are the wrong way round", f"make {longer} the longer one")
        if not self.beat_s < self.stall_s <= self.collective_s:
            raise UserError("timeouts must be beat_s < stall_s <= collective_s", "see ft.control.timeouts")

    def calibrated(self, step_s: float | None) -> "Timeouts":
        """With those that depend on the step time set by its median; ``None``: no step has ended yet."""
        if step_s is None:
            return replace(self, stall_s=self.start_s, collective_s=self.start_s, drain_s=max(self.drain_s, 30.0))
        return replace(
            self,
            stall_s=self.stall_s + 2.0 * step_s,
            collective_s=self.collective_s + 10.0 * step_s,
            drain_s=self.drain_s + 2.0 * step_s,
        )
