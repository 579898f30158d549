"""Decides what an agent does about a control plane that does not answer: wait, take over, or fence its own workers."""

from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts
from ft.platform.standstill import MOST_IN_A_ROW

WAIT, CLAIM, FENCE, RENEW, GIVE_UP = "wait", "claim", "fence", "renew", "give up"
"""What an agent can do.

- wait: do nothing.
- claim: claim the next term and start a control plane.
- fence: end this node's workers.
- renew: the control plane that starts beside this agent makes no progress; kill it and start another one.
- give up: end the run on this node.
"""


@dataclass(frozen=True)
class View:
    """What an agent has observed of the control plane.

    Attributes:
        silent_s: seconds since the control plane last answered this agent.
        lease_s: seconds for which the agent has watched the lease without seeing a renewal; None if the agent sees no
            lease, because it shares no directory with the control plane.
        serving_s: seconds for which the control plane of the current term has accepted connections, None if it does not
            yet.
        turn: how many agents may claim the next term before this one.
        taken_in: the control plane has answered this agent before. Otherwise no logical ranks of this node can have
            been given to others.
        idle_s: seconds for which the control plane that starts beside this agent has made no progress.
        idle_starts: how many control planes in a row have been replaced for making no progress.
    """

    silent_s: float
    lease_s: float | None
    serving_s: float | None
    turn: int
    taken_in: bool = True
    idle_s: float = 0.0
    idle_starts: int = 0


def decide(view: View, timeouts: Timeouts) -> tuple[str, str]:
    """Return (action, reason).

    While the lease is being renewed, a control plane takes decisions. An agent that cannot reach it is about to be
    declared lost, and fences itself: it ends its workers before their logical ranks are given to others.

    Once the lease has expired, no process takes decisions. Training goes on, and the agents try, one after the other,
    to claim the next term; the first to succeed starts the control plane for all.
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
