"""Detection of hung workers and lost agents: pure functions of heartbeats, their age and the timeouts.

On a device, operations are started by the host and carried out later, so a worker waits if an operation that it has
started is unfinished, whatever its host does. If every worker has an unfinished operation, the one at fault cannot be
told from what they report. A worker whose host hangs may have started a receive before; the workers that it delays have
started operations, too, and their hosts are blocked at the next value that they read from the device. Which operations
the members of a group have not started yet does not help: each of two such workers may lack an operation of the other.
What helps is to close the epoch: a blocked host leaves it, and a hung one does not and is replaced for that
(``ft.job.control.deadlines``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts
from ft.job.messages import ASIDE, Beat

_BEATS = 10
"""Number of heartbeats of which at least one arrives from a worker whose Python threads run."""


@dataclass(frozen=True)
class WorkerView:
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

    def waits(self, timeouts: Timeouts) -> bool:
        """Return whether the worker waits for others: in communication, or because it is done.

        A worker whose heartbeats have stopped is not believed to wait any more.
        """
        return self.done or (self.beat.doing == "wait" and not self.is_silent(timeouts))

    def is_silent(self, timeouts: Timeouts) -> bool:
        """Return whether the worker's heartbeats had stopped when its agent sent the last one on."""
        return self.beat.age_s > _BEATS * timeouts.beat_s


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


def stalled(views: Mapping[str, WorkerView], timeouts: Timeouts) -> list[Culprit]:
    """Return the workers that delay the others: not in communication for longer than a step can take, while others are.

    A worker waits if it is in a communication operation, or is done and waits for the end of the others.
    """
    computing = {worker: view for worker, view in views.items() if not view.waits(timeouts)}
    if len(computing) == len(views):
        return []
    found = []
    for worker, view in computing.items():
        limit, since_s = _limit(view, timeouts), view.since_s
        if view.beat.doing == "wait":
            since_s -= view.beat.since_s  # while it waited it delayed nobody
        if since_s > limit:
            where = f"{view.beat.where} without heartbeats" if view.is_silent(timeouts) else view.beat.where
            found.append(Culprit(worker, where, since_s, limit))
    return found


def at_a_standstill(views: Mapping[str, WorkerView], timeouts: Timeouts) -> list[Culprit]:
    """Return the workers that have not finished, if all of them have waited for longer than one slow worker explains.

    While a worker has not ended its first step, ``launch_s`` is added: it may still load kernels, or connect.
    """
    waiting = {worker: view for worker, view in views.items() if not view.done}
    if not waiting or not all(view.waits(timeouts) for view in waiting.values()):
        return []
    steps = [view.beat.step_s for view in waiting.values() if view.beat.step_s]
    limit = timeouts.calibrated(max(steps, default=None)).collective_s
    if 0 < len(steps) < len(waiting):
        limit += timeouts.launch_s
    if min(view.since_s for view in waiting.values()) <= limit:
        return []
    return [Culprit(worker, view.beat.where, view.since_s, limit) for worker, view in waiting.items()]


def endless(views: Mapping[str, WorkerView], timeouts: Timeouts) -> list[Culprit]:
    """Return the workers whose step has lasted longer than any step can, whether or not others wait for them.

    Workers that wait are left out: those that they wait for are at fault. This finds a hang that delays no other worker
    of the run: a worker that trains a replica of the model alone, or all workers at once.
    """
    found = []
    for worker, view in views.items():
        if view.waits(timeouts) or view.beat.doing in ("idle", "aside"):
            continue
        limit = timeouts.calibrated(view.beat.step_s).endless_s
        at_step_s = view.beat.at_step_s + view.beat.age_s + view.age_s
        if at_step_s > limit:
            found.append(Culprit(worker, view.beat.where, at_step_s, limit))
    return found


def quiet_s(views: Mapping[str, WorkerView], timeouts: Timeouts) -> float:
    """Return for how many seconds no worker has gotten anywhere: none has ended an operation or begun a step.

    A worker that works on an evaluation or a save gets somewhere for ``start_s`` seconds.
    """

    def of(view: WorkerView) -> float:
        works = view.beat.doing == "aside" and view.beat.where in ASIDE and view.since_s <= timeouts.start_s
        return 0.0 if works else view.since_s

    return min(map(of, views.values()), default=0.0)


def lost_agents(now: float, heard_at: Mapping[str, float], timeouts: Timeouts) -> list[tuple[str, float]]:
    """Return (node, seconds of silence) for each lost agent. ``heard_at``: node -> time of its last message, in s.

    Return nothing if all agents are silent: then the control plane itself is partitioned or was paused.
    """
    quiet = {node: now - at for node, at in heard_at.items() if now - at > timeouts.agent_lost_s}
    return sorted(quiet.items()) if len(quiet) < len(heard_at) else []


def _limit(view: WorkerView, timeouts: Timeouts) -> float:
    # "aside" includes checkpoint saves, whose duration does not depend on the step time.
    if view.beat.doing in ("idle", "aside") or view.beat.step_s is None:
        return timeouts.start_s
    return timeouts.calibrated(view.beat.step_s).stall_s
