"""What an agent does about a control plane that does not answer."""

from dataclasses import dataclass

from ft.control.timeouts import Timeouts

WAIT, CLAIM, FENCE, GIVE_UP = "wait", "claim", "fence", "give up"


@dataclass(frozen=True)
class View:
    """What the agent sees.

    Attributes:
        silent_s: since the control plane has last answered this agent.
        lease_s: for how long it has watched the control plane's lease, and not seen it renewed; None: there is none to
            be seen, so it shares no directory with it.
        serving_s: for how long the control plane of the present term has offered connections, None if it does not yet.
        turn: how many agents are to go before this one.
    """

    silent_s: float
    lease_s: float | None
    serving_s: float | None
    turn: int


def decide(view: View, timeouts: Timeouts) -> tuple[str, str]:
    """(what to do, why).

    As long as the lease runs, somebody decides: an agent that cannot reach it is about to be taken for lost, and ends
    its workers before their logical ranks are given to others. When it has run out, nobody does: training goes on, and
    the agents start a control plane, one after the other, the first to claim it for all.
    """
    if view.silent_s <= timeouts.contact_s:
        return WAIT, ""
    if view.lease_s is None:
        if view.silent_s > timeouts.away_s:
            return GIVE_UP, f"no control plane for {view.silent_s:.0f} s"
        cut_off = view.silent_s > timeouts.fence_s
        return (FENCE, "cut off from the control plane, whose lease cannot be seen") if cut_off else (WAIT, "")
    if view.lease_s > timeouts.lease_s + view.turn * timeouts.turn_s:
        return CLAIM, f"the control plane has not renewed its lease for {view.lease_s:.1f} s"
    if view.serving_s is not None and min(view.silent_s, view.serving_s) > timeouts.fence_s:
        return FENCE, f"cut off for {view.silent_s:.1f} s from a control plane that goes on"
    return WAIT, ""
