"""Every timeout of the fault path, in one table."""

from dataclasses import dataclass, replace

from ft.base import timeout_order as ladder


@dataclass(frozen=True)
class Timeouts:
    """All in seconds.

    Attributes:
        beat_s: between two heartbeats of a worker; a thread sends them, so they say that the process lives.
        agent_beat_s: between two of an agent; they carry all that its workers said.
        stopped_s: without a heartbeat, a worker whose process is stopped (state T) counts as hung: it cannot go on.
        silent_s: without a heartbeat, another worker counts as hung: a busy machine delays a thread, not for so long.
        silent_start_s: in place of silent_s until the first step has ended: imports, compilation hold the interpreter.
        stuck_s: the warm pool owes workers, or the control plane is to start, and does nothing at all for so long
            (imports do something): it is killed and started again; after the third time the run ends.
        mute_s: a worker of the start that does nothing at all, while others have attached, counts as hung.
        suspicion_s: a connection was lost: so long the death behind it may be on its way; then itself is blamed.
        quorum_s: a control plane that has heard nothing of most agents for so long lets its lease run out, for one of
            them to take over: it may be the one that was cut off.
        contact_s: an agent whose control plane has not answered for so long looks for it anew.
        fence_s: an agent that is cut off, while the control plane goes on elsewhere, ends its workers: their logical
            ranks are about to be given to others.
        agent_lost_s: without a heartbeat of its agent a node counts as lost: several must be missing, not one.
        lease_beat_s: between two renewals of the control plane's lease.
        lease_s: without a renewal there is no control plane: the next agent starts one; + a turn for each before it.
        turn_s: of one agent.
        away_s: for so long agents look for a control plane before they end the run.
        stall_s: a worker that beats, and computes while others wait, counts as hung: it may be saving; + 3 steps.
        start_s: in place of stall_s until a worker's first step has ended: compilation, caches, first allocations.
        collective_s: all wait and nobody computes: a connection is at fault, not a slow worker; + 3 steps.
        drain_s: to leave a closed epoch: the step's next group operation, or a copy to host memory, ends it; + 3 steps.
        verdict_s: a worker whose connection failed waits so long for the epoch to be closed, before it raises.
        repair_s: to rebuild groups and restore state; the same again for the first step to begin.
        assemble_s: for a joiner to build its model and optimizer.
        ready_s: for a worker that was started to attach: imports, on a machine that is busy with training.
        leave_s: a worker has ended well: for so long the others may go on before that counts as a loss.
        join_s: for all agents to come and for all workers to attach at the start.
    """

    beat_s: float = 0.1
    agent_beat_s: float = 0.25
    stopped_s: float = 0.25
    silent_s: float = 1.0
    silent_start_s: float = 30.0
    stuck_s: float = 18.0
    mute_s: float = 50.0
    suspicion_s: float = 0.3
    quorum_s: float = 0.75
    contact_s: float = 1.5
    fence_s: float = 3.0
    agent_lost_s: float = 3.5
    lease_beat_s: float = 0.25
    lease_s: float = 1.25
    turn_s: float = 0.25
    away_s: float = 120.0
    stall_s: float = 10.0
    start_s: float = 300.0
    collective_s: float = 15.0
    drain_s: float = 20.0
    verdict_s: float = 40.0
    repair_s: float = 60.0
    assemble_s: float = 120.0
    ready_s: float = 180.0
    leave_s: float = 15.0
    join_s: float = 600.0

    def check(self) -> "Timeouts":
        """Returns itself.

        Raises:
            UserError: one is not positive, or not longer than those it waits for.
        """
        ladder.check(self, "timeout", _LADDER)
        return self

    def calibrated(self, step_s: float | None) -> "Timeouts":
        """Those that a step may hold up, longer by three step times. ``step_s``: None before a step has ended."""
        if step_s is None:
            return replace(self, stall_s=self.start_s, collective_s=self.start_s)
        slack = 3.0 * step_s
        grown = {name: getattr(self, name) + slack for name in ("stall_s", "collective_s", "drain_s", "verdict_s")}
        return replace(self, **grown)


BEHIND_ETCD = {"contact_s": 3.0, "lease_s": 3.0, "fence_s": 5.5, "agent_lost_s": 6.0}
"""Where the control plane is reached through etcd: an election there, 1 to 2 s with its defaults, or a server that
stands still, must not look like the loss of a node. A control plane that is cut off from etcd notices it after 2 s, and
its lease is over before its agents think that it goes on without them."""

_LADDER = (
    ("beat_s", "stopped_s"),
    ("stopped_s", "silent_s"),
    ("silent_s", "silent_start_s"),
    ("agent_beat_s", "agent_lost_s"),
    ("agent_beat_s", "contact_s"),
    ("contact_s", "fence_s"),
    ("fence_s", "agent_lost_s"),
    ("lease_beat_s", "lease_s"),
    ("agent_beat_s", "quorum_s"),
    ("quorum_s", "contact_s"),
    ("lease_s", "fence_s"),
    ("lease_s", "away_s"),
    ("silent_s", "agent_lost_s"),
    ("silent_s", "stall_s"),
    ("stall_s", "start_s"),
    ("silent_s", "stuck_s"),
    ("stuck_s", "mute_s"),
    ("stuck_s", "away_s"),
    ("mute_s", "join_s"),
    ("stall_s", "collective_s"),
    ("agent_lost_s", "drain_s"),
    ("collective_s", "drain_s"),
    ("suspicion_s", "verdict_s"),
    ("collective_s", "verdict_s"),
    ("drain_s", "repair_s"),
    ("drain_s", "assemble_s"),
    ("assemble_s", "join_s"),
    ("ready_s", "join_s"),
)
