"""Who hangs, by what the workers' heartbeats say: pure functions of the beats, their age and the limits."""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts
from ft.job.messages import Beat


@dataclass(frozen=True)
class View:
    """One seated worker: its last beat, how long ago that was true, and whether its work is done."""

    beat: Beat
    age_s: float
    done: bool = False

    @property
    def since_s(self) -> float:
        """For how long it has been doing what it does."""
        return self.beat.since_s + self.beat.age_s + self.age_s


@dataclass(frozen=True)
class Culprit:
    """``worker`` holds the others up, at ``where``, for ``since_s`` when ``limit_s`` were allowed."""

    worker: str
    where: str
    since_s: float
    limit_s: float


def stalled(views: Mapping[str, View], timeouts: Timeouts) -> list[Culprit]:
    """Workers that are in no group operation, for longer than a step can take, while another one waits, or is done and
    waits for the end.

    Args:
        views: by worker; everyone with a seat in the epoch. timeouts: for a step of no length.
    """
    if not any(view.beat.doing == "wait" or view.done for view in views.values()):
        return []
    found = []
    for worker, view in views.items():
        limit = _limit(view, timeouts)
        if view.beat.doing != "wait" and not view.done and view.since_s > limit:
            found.append(Culprit(worker, view.beat.where, view.since_s, limit))
    return found


def at_a_standstill(views: Mapping[str, View], timeouts: Timeouts) -> list[Culprit]:
    """Everybody, if everybody who is not done waits, and has for longer than a slow worker could be the reason."""
    waiting = {worker: view for worker, view in views.items() if not view.done}
    if not waiting or any(view.beat.doing != "wait" for view in waiting.values()):
        return []
    steps = [view.beat.step_s for view in waiting.values() if view.beat.step_s]
    limit = timeouts.calibrated(max(steps, default=None)).collective_s
    if min(view.since_s for view in waiting.values()) <= limit:
        return []
    return [Culprit(worker, view.beat.where, view.since_s, limit) for worker, view in waiting.items()]


def lost_agents(now: float, heard_at: Mapping[str, float], timeouts: Timeouts) -> list[tuple[str, float]]:
    """(node, seconds of silence) of the agents that are lost.

    None, when nothing is heard of any of them: then it is this side that was cut off or held up.
    """
    quiet = {node: now - at for node, at in heard_at.items() if now - at > timeouts.agent_lost_s}
    return sorted(quiet.items()) if len(quiet) < len(heard_at) else []


def _limit(view: View, timeouts: Timeouts) -> float:
    if view.beat.doing in ("idle", "aside") or view.beat.step_s is None:  # aside: saving, which has no length of a step
        return timeouts.start_s
    return timeouts.calibrated(view.beat.step_s).stall_s
