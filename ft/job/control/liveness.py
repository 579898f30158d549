"""Detection of hung workers and lost agents: pure functions of heartbeats, their age and the timeouts."""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts
from ft.job.messages import Beat


@dataclass(frozen=True)
class View:
    """The data that the control plane has about one worker that holds a logical rank.

    Attributes:
        beat: its last heartbeat.
        age_s: seconds since the agent of this worker forwarded that heartbeat.
        done: whether the worker has finished its training steps.
    """

    beat: Beat
    age_s: float
    done: bool = False

    @property
    def since_s(self) -> float:
        """Return the seconds for which the worker has been in the activity that its heartbeat names."""
        return self.beat.since_s + self.beat.age_s + self.age_s


@dataclass(frozen=True)
class Culprit:
    """A worker that delays the others.

    Attributes:
        worker: its name.
        where: the operation or place that it is in.
        since_s: for how long, in seconds.
        limit_s: how long is allowed, in seconds.
    """

    worker: str
    where: str
    since_s: float
    limit_s: float


def stalled(views: Mapping[str, View], timeouts: Timeouts) -> list[Culprit]:
    """Return the workers that delay the others: not in communication for longer than a step can take, while others are.

    A worker waits if it is in a communication operation, or is done and waits for the end of the others.

    Args:
        views: worker -> view, for every worker with a seat in the epoch.
        timeouts: the timeouts before they are extended by the step time.
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
    """Return all workers that are not done if all of them wait, for longer than one slow worker could cause."""
    waiting = {worker: view for worker, view in views.items() if not view.done}
    if not waiting or any(view.beat.doing != "wait" for view in waiting.values()):
        return []
    steps = [view.beat.step_s for view in waiting.values() if view.beat.step_s]
    limit = timeouts.calibrated(max(steps, default=None)).collective_s
    if min(view.since_s for view in waiting.values()) <= limit:
        return []
    return [Culprit(worker, view.beat.where, view.since_s, limit) for worker, view in waiting.items()]


def lost_agents(now: float, heard_at: Mapping[str, float], timeouts: Timeouts) -> list[tuple[str, float]]:
    """Return (node, seconds of silence) for each lost agent.

    Return nothing if all agents are silent: then the control plane itself is partitioned or was paused.

    Args:
        now: the present time, in seconds.
        heard_at: node -> time of the last message of its agent, in seconds.
        timeouts: time limits of the run.
    """
    quiet = {node: now - at for node, at in heard_at.items() if now - at > timeouts.agent_lost_s}
    return sorted(quiet.items()) if len(quiet) < len(heard_at) else []


def _limit(view: View, timeouts: Timeouts) -> float:
    # "aside" includes checkpoint saves, whose duration does not depend on the step time.
    if view.beat.doing in ("idle", "aside") or view.beat.step_s is None:
        return timeouts.start_s
    return timeouts.calibrated(view.beat.step_s).stall_s
