"""Leader failover, from an agent's point of view: decide what an agent does when the control plane does not answer.

While a control plane is active, it renews a lease. Each new one has a higher term number. An agent that gets no answer
may wait, take over by starting a new control plane, or fence (kill) its own workers. :func:`decide` is a pure function;
``control_plane`` calls it.
"""

from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts
from ft.platform.processes import MOST_IN_A_ROW

WAIT, CLAIM, FENCE, RENEW, GIVE_UP = "wait", "claim", "fence", "renew", "give up"
"""Actions of an agent.

- wait: do nothing.
- claim: claim the next term and start a control plane on this node.
- fence: kill this node's workers.
- renew: kill the control plane that was started on this node and does not get through its startup; start another one.
- give up: end the run on this node.
"""


@dataclass(frozen=True)
class ControlPlaneView:
    """Observations of an agent about the control plane.

    Attributes:
        silent_s: seconds since the control plane last answered this agent.
        lease_s: seconds for which the agent has watched the lease without seeing a renewal; None if the agent sees no
            lease, because it shares no directory with the control plane.
        serving_s: seconds for which the control plane of the current term has accepted connections, None if it does not
            yet.
        turn: number of agents that may claim the next term before this one.
        taken_in: whether the control plane has answered this agent before. If not, this node's workers have no logical
            ranks that could be assigned to other workers, so fencing is not needed.
        idle_s: seconds for which a control plane that is starting up on this node has made no progress; 0 if none is
            starting up here.
        idle_starts: number of control planes in a row that were killed on this node because their startup made no
            progress.
    """

    silent_s: float
    lease_s: float | None
    serving_s: float | None
    turn: int
    taken_in: bool = True
    idle_s: float = 0.0
    idle_starts: int = 0


def decide(view: ControlPlaneView, timeouts: Timeouts) -> tuple[str, str]:
    """Return (action, reason).

    While the lease is being renewed, a control plane is active. An agent that cannot reach it will be declared
    lost, and therefore fences itself: it kills its workers before their logical ranks are assigned to other workers.

    Once the lease has expired, no control plane is active. Training continues, and the agents try in turn to claim
    the next term; the first agent that succeeds starts the new control plane.
    """
    if view.silent_s <= timeouts.contact_s:
        return WAIT, ""
    if view.idle_s > timeouts.stuck_s:
        why = f"the control plane that is to start has done nothing for {view.idle_s:.0f} s"
        if view.idle_starts + 1 >= MOST_IN_A_ROW:
            return GIVE_UP, f"{why}, {MOST_IN_A_ROW} times in a row"
        return RENEW, why
    if view.lease_s is None:
        if view.silent_s > timeouts.away_s:
            return GIVE_UP, f"no control plane for {view.silent_s:.0f} s"
        cut_off = view.silent_s > timeouts.fence_s and view.taken_in
        return (FENCE, "cut off from the control plane, whose lease cannot be seen") if cut_off else (WAIT, "")
    if view.lease_s > timeouts.lease_s + view.turn * timeouts.turn_s:
        return CLAIM, f"the control plane has not renewed its lease for {view.lease_s:.1f} s"
    unheard_s = 0.0 if view.serving_s is None else min(view.silent_s, view.serving_s)
    if view.taken_in and unheard_s > timeouts.fence_s:
        return FENCE, f"cut off for {view.silent_s:.1f} s from a control plane that goes on"
    if not view.taken_in and unheard_s > timeouts.away_s:
        return GIVE_UP, f"the control plane serves, and has not answered this node for {unheard_s:.0f} s"
    return WAIT, ""
