"""What an agent does about a control plane that does not answer."""

from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts
from ft.platform.standstill import MOST_IN_A_ROW

WAIT, CLAIM, FENCE, RENEW, GIVE_UP = "wait", "claim", "fence", "renew", "give up"
"""renew: the control plane beside this agent gets nowhere, another one is started in its place."""


@dataclass(frozen=True)
class View:
    """What the agent sees.

    Attributes:
        silent_s: since the control plane has last answered this agent.
        lease_s: for how long it has watched the control plane's lease, and not seen it renewed; None: there is none to
            be seen, so it shares no directory with it.
        serving_s: for how long the control plane of the present term has offered connections, None if it does not yet.
        turn: how many agents are to go before this one.
        taken_in: the control plane has answered this agent at some time; before, nothing of its node can be given away.
        idle_s: for how long the control plane that is to start beside this agent has done nothing at all.
        idle_starts: how often in a row that was so before.
    """

    silent_s: float
    lease_s: float | None
    serving_s: float | None
    turn: int
    taken_in: bool = True
    idle_s: float = 0.0
    idle_starts: int = 0


def decide(view: View, timeouts: Timeouts) -> tuple[str, str]:
    """(what to do, why).

    As long as the lease runs, somebody decides: an agent that cannot reach it is about to be taken for lost, and ends
    its workers before their logical ranks are given to others. When it has run out, nobody does: training goes on, and
    the agents start a control plane, one after the other, the first to claim it for all.
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
