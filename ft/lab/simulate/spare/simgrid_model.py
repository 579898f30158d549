"""Simulation of a training run with SimGrid, a discrete-event simulator: validates ``ft.lab.simulate.spare.run``.

Each data-parallel group is an actor on its own host that computes, and is killed at its next failure time, called its
clock. A coordinator actor waits for all groups, simulates the all-reduce, calls the controller after a loss, and
restarts all groups from the checkpoint if necessary. Only the scheme (SPARe, replication or checkpoints), which
determines the effect of a loss, and the distribution of failures are shared with the step-level simulation. Durations
do not vary at random. SimGrid 3.32 and 4 are supported.
"""

import math
import tempfile
from pathlib import Path

import numpy as np

from ft.lab.simulate.spare.clocks import Law
from ft.lab.simulate.spare.run import Job, RunTotals
from ft.lab.simulate.spare.schemes import Scheme

_SPEED = 1e9
_PLATFORM = """<?xml version='1.0'?>
<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1">
  <zone id="all" routing="Full">
    <host id="coordinator" speed="1Gf"/>
{hosts}
  </zone>
</platform>
"""


def simulate(job: Job, scheme: Scheme, law: Law, period_s: float) -> RunTotals:
    """Simulate one run. Can be called only once in a process, because SimGrid allows one engine per process.

    Args:
        job: the job.
        scheme: the fault-tolerance scheme, in its initial state.
        law: distribution of the failures.
        period_s: seconds from the end of a checkpoint to the end of the next.

    Raises:
        ImportError: SimGrid is not installed.
    """
    import simgrid

    engine = simgrid.Engine(["ft", "--log=root.thresh:error"])
    hosts = "\n".join(f'    <host id="group-{group}" speed="1Gf"/>' for group in range(job.groups))
    with tempfile.TemporaryDirectory() as folder:
        platform = Path(folder) / "platform.xml"
        platform.write_text(_PLATFORM.format(hosts=hosts))
        engine.load_platform(str(platform))
    world = _World(simgrid, job, law)
    coordinator = _Coordinator(world, job, scheme, period_s)
    world.start("coordinator", "coordinator", coordinator.run)
    engine.run()
    return coordinator.seen


class _World:
    """The groups, their failure clocks, and their computations.

    Attributes:
        due: simulated time in seconds at which each group fails next.
        lost: groups that have failed and have not been renewed.
    """

    def __init__(self, simgrid, job: Job, law: Law):
        self._simgrid, self._job, self._law = simgrid, job, law
        self._rng = np.random.default_rng(0)
        self.due = [math.inf] * job.groups
        self._armed = [0] * job.groups
        self._working: dict[int, object] = {}
        self.lost: list[int] = []

    @property
    def now(self) -> float:
        return float(self._simgrid.Engine.get_clock())

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            self._simgrid.this_actor.sleep_for(seconds)

    def start(self, name: str, host: str, does):
        """Start an actor on a host and return it; ``does`` is the function that the actor executes."""
        where = self._simgrid.Host.by_name(host)
        if hasattr(where, "add_actor"):
            return where.add_actor(name, does)
        return self._simgrid.Actor.create(name, where, does)

    def renew(self, group: int) -> None:
        """Replace a group at the current time, and draw its next failure."""
        if group in self.lost:
            self.lost.remove(group)
        self.arm(group, float(self._law.after(np.array([self.now]), np.array([group]), self._rng)[0]))

    def postpone(self, seconds: float) -> None:
        """Postpone the next failure of every group that is not lost, by ``seconds``."""
        for group, due in enumerate(self.due):
            if group not in self.lost and math.isfinite(due):
                self.arm(group, due + seconds)

    def arm(self, group: int, due: float) -> None:
        """Set the time of a group's next failure, in place of any earlier one."""
        self._armed[group] += 1
        self.due[group] = due
        if math.isfinite(due):
            turn = self._armed[group]
            self.start(f"clock-{group}", "coordinator", lambda: self._die(group, due, turn)).daemonize()

    def disarm(self) -> None:
        """Cancel the next failures of all groups."""
        for group in range(self._job.groups):
            self._armed[group] += 1

    def _die(self, group: int, due: float, turn: int) -> None:
        self._simgrid.this_actor.sleep_until(due)
        if self._armed[group] == turn:
            self.lost.append(group)
            if group in self._working:
                self._working[group].kill()

    def watch(self, group: int, actor) -> None:
        """Register the actor that is killed if the group fails; None unregisters it."""
        self._working[group] = actor
        if actor is None:
            del self._working[group]

    def work(self, groups, seconds: float) -> None:
        """Let groups compute for ``seconds``, and return when each group has finished or failed."""
        flops = seconds * _SPEED
        for group in groups:
            self._working[group] = self.start(
                f"group-{group}", f"group-{group}", lambda: self._simgrid.this_actor.execute(flops)
            )
        for actor in list(self._working.values()):
            actor.join()
        self._working.clear()


class _Coordinator:
    def __init__(self, world: _World, job: Job, scheme: Scheme, period_s: float):
        self._world, self._job, self._scheme, self._period_s = world, job, scheme, period_s
        self._known: set[int] = set()
        self._unsaved = 0
        self.seen = RunTotals()

    def run(self) -> None:
        job, world, seen = self._job, self._world, self.seen
        for group in range(job.groups):
            world.renew(group)
        saved_at = 0.0
        while seen.steps + self._unsaved < job.steps and world.now < job.limit * job.base_s:
            if not self._step():
                self._restart()
                saved_at = world.now
            elif world.now - saved_at >= self._period_s - job.save_s:
                seen.steps, self._unsaved = seen.steps + self._unsaved, 0
                world.sleep(job.save_s)
                saved_at = world.now
        seen.steps += self._unsaved
        seen.total_s = world.now

    def _step(self) -> bool:
        job, seen = self._job, self.seen
        seen.attempts += 1
        self._compute(self._scheme.stack)
        while True:
            self._world.sleep(job.all_reduce_s / 2)
            if not (lost := [group for group in self._world.lost if group not in self._known]):
                break
            if not self._lose(lost):
                return False
        self._world.sleep(job.all_reduce_s / 2)
        self._unsaved += 1
        return True

    def _lose(self, lost: list[int]) -> bool:
        seen = self.seen
        self._known.update(lost)
        seen.failures += len(lost)
        seen.losses += 1
        wiped, patch = self._scheme.lose(lost)
        self._world.sleep(self._job.controller_s if self._scheme.reorders else 0.0)
        if wiped:
            return False
        if patch:
            seen.patches += 1
            self._compute(patch)
        self._world.sleep(self._job.shrink_s)
        return True

    def _compute(self, stacks: int) -> None:
        self.seen.stacks += stacks
        alive = [group for group in range(self._job.groups) if group not in self._world.lost]
        self._world.work(alive, stacks * self._job.stack_s)

    def _restart(self) -> None:
        job, world = self._job, self._world
        self.seen.restarts += 1
        self._unsaved = 0
        self._scheme.reset()
        if job.restart == "extend":
            groups = [
                world.start(f"back-{group}", "coordinator", lambda group=group: self._come_back(group))
                for group in range(job.groups)
            ]
            for actor in groups:
                actor.join()
        elif job.restart == "replace":
            world.sleep(job.restart_s)
        else:
            before = list(world.lost)
            world.disarm()
            world.sleep(job.restart_s)
            world.lost[:] = before
            world.postpone(job.restart_s)
        if job.restart != "extend":
            for group in list(world.lost):
                world.renew(group)
        self._known.clear()

    def _come_back(self, group: int) -> None:
        """Simulate one group's part of a global restart with ``ft.lab.simulate.spare.restart.extend``.

        A lost group gets a new failure time when it is ready. Another group may fail during its restart, and then
        restarts again.
        """
        job, world = self._job, self._world
        if group in self._known:
            world.sleep(job.restart_s)
            world.renew(group)
            return
        if group in world.lost:  # the group failed after the coordinator last checked
            world.sleep(job.restart_s - (world.now - world.due[group]))
            world.renew(group)
            return
        restarting = world.start(f"restart-{group}", f"group-{group}", lambda: world.sleep(job.restart_s))
        world.watch(group, restarting)
        restarting.join()
        world.watch(group, None)
        if group in world.lost:
            world.sleep(job.restart_s)
            world.renew(group)
