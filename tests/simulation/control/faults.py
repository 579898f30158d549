"""The faults of the control plane's simulation: what each kind does, how often it is drawn, and when it strikes."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.job.control.state import ENDED, RUNNING
from tests.simulation import engine
from tests.simulation.control.checks import ANYTHING, HOT_SWAP, IN_PLACE, NOTHING
from tests.simulation.control.plane import AFTER, BEFORE, TORN, WRITTEN
from tests.simulation.control.snapshots import COMPLETE
from tests.simulation.control.training import ERRORS

if TYPE_CHECKING:
    from tests.simulation.control.agent import Agent
    from tests.simulation.control.cluster import Cluster
    from tests.simulation.control.worker import Worker

# --- targets ----------------------------------------------------------------------------------------------------------

Strike = Callable[["Cluster"], str]
"""Function that injects a fault and returns a description of the target, or "" if the cluster has no target for it."""
_AWAITED = {
    m.Close: (m.WorkerReleased,),
    m.Open: (m.WorkerReleased, m.WorkerArrived),
    m.Repair: (m.WorkerRepaired,),
    m.Resume: (m.WorkerResumed, m.WorkerDone),
}
"""Order -> types of the reports that it requests."""
_SIGNALS = (-9, -9, -11, -6)
_WORKER = "{0.name} (rank {0.rank})"
_PAUSE_S, _LONG_S = (0.05, 0.2, 0.5, 1.5, 4.0), (0.3, 1.0, 2.0, 3.0, 6.0, 15.0)
"""Possible durations in virtual seconds, of the pause of a worker and of all other temporary faults."""


def _on(targets: "Callable[[Cluster], list]", do: "Callable[[Cluster, Any], str | None]", title: str) -> Strike:
    """Return a fault that strikes one of the ``targets`` at random; ``do``: see ``on_worker``."""

    def strike(cluster: "Cluster") -> str:
        chosen = targets(cluster)
        if not chosen:
            return ""
        target = cluster.rng.choice(chosen)
        return (do(cluster, target) or "") + title.format(target)

    return strike


def on_worker(do: "Callable[[Cluster, Worker], str | None]", early: bool = False) -> Strike:
    """Return a fault that strikes a random worker; in three of four cases, a worker that holds a logical rank.

    Args:
        do: applies the fault to the worker, and returns a prefix for the description.
        early: whether the fault may also strike before any worker has attached to the control plane. Most faults may
            not, because a training script that never attaches is allowed to hang for ever.
    """

    def targets(cluster: "Cluster") -> "list[Worker]":
        everyone = [w for w in cluster.workers() if early or w.attached or cluster.plane.state.attached]
        seated = [w for w in everyone if w.rank >= 0]
        return seated if seated and cluster.rng.random() < 0.75 else everyone

    return _on(targets, do, _WORKER)


def on_training(do: "Callable[[Cluster, Worker], str | None]") -> Strike:
    """Return a fault that strikes a random worker that is executing the collectives of its epoch."""
    return _on(lambda cluster: [w for w in cluster.workers() if w.inside], do, _WORKER)


def on_agent(do: "Callable[[Cluster, Agent], str | None]") -> Strike:
    """Return a fault that strikes a random agent, and possibly the workers and the control plane on its host."""
    return _on(lambda cluster: cluster.living(), do, "{0.node}")


# --- workers ---------------------------------------------------------------------------------------------------------


def kill(cluster: "Cluster", worker: "Worker") -> None:
    """Kill a worker with a random signal."""
    worker.agent.ended(worker, cluster.rng.choice(_SIGNALS))


def kill_two(cluster: "Cluster") -> str:
    """Kill two workers at the same moment."""
    everyone = cluster.workers()
    chosen = cluster.rng.sample(everyone, min(2, len(everyone)))
    for worker in chosen:
        kill(cluster, worker)
    return ", ".join(worker.name for worker in chosen)


def kill_copies(cluster: "Cluster") -> str:
    """Kill a logical rank and all ranks that hold a copy of its state."""
    seated = [w for w in cluster.workers() if w.inside]
    if not seated:
        return ""
    worker = cluster.rng.choice(seated)
    ranks = [worker.rank, *cluster.shape.copies_at(worker.rank)]
    chosen = [w for w in seated if w.rank in ranks]
    for other in chosen:
        kill(cluster, other)
    return ", ".join(other.name for other in chosen)


def exits(code: int) -> "Callable[[Cluster, Worker], None]":
    """Return a fault that ends a worker with an exit code."""

    def strike(cluster: "Cluster", worker: "Worker") -> None:
        worker.quits = code == 0
        worker.agent.ended(worker, code)

    return strike


def stop(cluster: "Cluster", worker: "Worker") -> None:
    """Stop the worker's process for good, as by SIGSTOP."""
    if not worker.stopped:
        worker.falls_silent()
        worker.stopped = True
        worker.agent.watch(worker, "T")


def pause(cluster: "Cluster", worker: "Worker") -> str:
    """Stop the worker's process, and continue it after a while."""
    seconds = cluster.rng.choice(_PAUSE_S)
    stop(cluster, worker)
    cluster.time.after(seconds, worker.go_on_after_stop)
    cluster.lasts(seconds)
    return f"for {seconds:g} s "


def fall_deaf(cluster: "Cluster", worker: "Worker") -> None:
    """Hang the worker with the interpreter lock held, so that none of its threads runs."""
    if not worker.deaf and not worker.stopped:
        worker.falls_silent()
        worker.deaf = True
        worker.agent.watch(worker, cluster.rng.choice("DRS"))


def spin(cluster: "Cluster", worker: "Worker") -> None:
    """Hang the training thread, while the worker still sends heartbeats."""
    worker.spins = True


def straggle(cluster: "Cluster", worker: "Worker") -> str:
    """Make the worker's next computation slower."""
    worker.slow = cluster.rng.choice([3.0, 8.0, 15.0, 40.0])
    return f"{worker.slow:g} times slower, "


def raises(kind: str) -> "Callable[[Cluster, Worker], None]":
    """Return a fault that makes the worker raise an exception of class ``kind`` once."""

    def strike(cluster: "Cluster", worker: "Worker") -> None:
        worker.defect = ERRORS[kind](f"planted {kind}")

    return strike


def ail(cluster: "Cluster", worker: "Worker") -> None:
    """Let the worker raise a recoverable error in every step from now on; a replacement worker does not fail."""
    worker.ails = True


def poison(kind: str) -> "Callable[[Cluster, Worker], str]":
    """Return a fault that makes one future step of a logical rank fail, for every worker that executes the step.

    Args:
        kind: "kill": the worker dies in the step; otherwise the class of the exception that the step raises.
    """

    def strike(cluster: "Cluster", worker: "Worker") -> str:
        step = worker.step + cluster.rng.randint(1, 4)
        cluster.poisoned[worker.rank, step] = kind
        return f"step {step} of "

    return strike


def mumble(cluster: "Cluster", worker: "Worker") -> None:
    """Lose the worker's next report that asks for an order, between the worker and its agent."""
    worker.mumbles = True


def reset(cluster: "Cluster", worker: "Worker") -> None:
    """Reset one of the worker's connections to its peers."""
    worker.broken_epoch = worker.epoch
    worker.poke()


def stick(cluster: "Cluster", worker: "Worker") -> None:
    """Lose a message of a collective, so that no further collective of this epoch completes."""
    cluster.mesh.stuck.add(worker.epoch)


def damage_own(cluster: "Cluster", worker: "Worker") -> None:
    """Damage some of the worker's own snapshots, so that their checksums do not match."""
    for slot in worker.stock.own.slots:
        slot.damaged |= slot.status == COMPLETE and cluster.rng.random() < 0.7


def damage_copy(cluster: "Cluster", worker: "Worker") -> None:
    """Damage some of the snapshot copies that the worker holds for other logical ranks."""
    for pair in worker.stock.copies.values():
        for slot in pair.slots:
            slot.damaged |= slot.status == COMPLETE and cluster.rng.random() < 0.7


# --- agents, nodes and networks --------------------------------------------------------------------------------------


def kill_agent(cluster: "Cluster", agent: "Agent") -> None:
    """Kill an agent, and the control plane if it is on the same host. Half of the hosts get a new agent."""
    if not agent.alive:
        return
    agent.die(silently=False)
    _control_goes_with(cluster, agent)
    if cluster.rng.random() < 0.5:
        cluster.comes_back(agent.host, agent.seats + agent.standbys)


def agent_ends(cluster: "Cluster", agent: "Agent") -> None:
    """Let an agent report that it leaves, and end."""
    agent.link.post(m.AgentLeaving(agent.node, 0))
    agent.excuse = True
    cluster.time.after(0.05, kill_agent, cluster, agent)


def power_off(cluster: "Cluster", agent: "Agent") -> None:
    """Switch off the agent's host, with everything that runs on the host."""
    agent.host.is_down = True
    agent.die(silently=True)
    _control_goes_with(cluster, agent)


def power_cycle(cluster: "Cluster", agent: "Agent") -> str:
    """Switch off the agent's host, and on again after a while, with a new agent."""
    seconds = cluster.rng.choice(_LONG_S)
    power_off(cluster, agent)

    def boot() -> None:
        agent.host.is_down = False
        cluster.comes_back(agent.host, agent.seats + agent.standbys)

    cluster.time.after(seconds, boot)
    cluster.lasts(seconds)
    return f"for {seconds:g} s "


def _control_goes_with(cluster: "Cluster", agent: "Agent") -> None:
    if cluster.plane.host is agent.host and cluster.plane.is_up:
        cluster.plane.die()


def pause_agent(cluster: "Cluster", agent: "Agent") -> str:
    """Stop an agent's process, and continue it after a while."""
    seconds = cluster.rng.choice(_LONG_S)
    if not agent.paused:
        agent.paused = agent.excuse = True
        cluster.time.after(seconds, agent.go_on)
    cluster.lasts(seconds)
    return f"for {seconds:g} s "


def tell_to_end(cluster: "Cluster", agent: "Agent") -> None:
    """Send SIGTERM to the agent, as a user or a scheduler does."""
    agent.excuse = True
    agent.told_to_end(15)


def cut(cluster: "Cluster", agent: "Agent") -> str:
    """Cut the network of the agent's host in both directions for a while."""
    return _cut(cluster, agent, ("up", "down"))


def cut_one_way(cluster: "Cluster", agent: "Agent") -> str:
    """Cut the network of the agent's host in one direction for a while."""
    direction = cluster.rng.choice(["up", "down"])
    return f"({direction}) " + _cut(cluster, agent, (direction,))


def flap(cluster: "Cluster", agent: "Agent") -> None:
    """Cut the network of the agent's host several times, each time for 0.4 s."""
    _excuse(cluster, agent)
    for i in range(cluster.rng.randint(2, 6)):
        cluster.time.after(i * 0.7, cluster.cut, agent.host, ("up", "down"), 0.4)
    cluster.lasts(5.0)


def slow_link(cluster: "Cluster", agent: "Agent") -> str:
    """Increase the latency of the host's network for 8 s."""
    host = agent.host
    host.slow_until, host.slow_s = cluster.time.now + 8.0, cluster.rng.choice([0.05, 0.3, 1.0, 4.0])
    _excuse(cluster, agent)
    cluster.calm_at = max(cluster.calm_at, host.slow_until + host.slow_s)
    return f"{host.slow_s:g} s "


def _cut(cluster: "Cluster", agent: "Agent", directions: tuple[str, ...]) -> str:
    seconds = cluster.rng.choice(_LONG_S)
    _excuse(cluster, agent)
    cluster.cut(agent.host, directions, seconds)
    cluster.lasts(seconds)
    return f"for {seconds:g} s "


def _excuse(cluster: "Cluster", agent: "Agent") -> None:
    """Note which agents may look lost to the control plane: all agents if this is the control plane's host, otherwise
    this agent alone.
    """
    struck = cluster.agents.values() if agent.host is cluster.plane.host else (agent,)
    for one in struck:
        one.excuse = True


# --- the control plane, starts, messages -----------------------------------------------------------------------------


def control_dies(cluster: "Cluster") -> str:
    """Let the control plane crash while it processes its next report."""
    if not cluster.plane.is_up or cluster.plane.paused:
        return ""
    moment = cluster.rng.choice([BEFORE, TORN, WRITTEN, AFTER])
    cluster.plane.dies_at = moment
    return moment


def control_pauses(cluster: "Cluster") -> str:
    """Pause the control plane's process. If its lease expires meanwhile, a successor takes over, and the process ends
    when it resumes.
    """
    plane, seconds = cluster.plane, cluster.rng.choice(_LONG_S)
    if plane.paused or not plane.is_up:
        return ""
    plane.paused, lease_s = True, cluster.timeouts.lease_s
    cluster.time.after(min(seconds, lease_s), plane.go_on, seconds > lease_s)
    cluster.lasts(seconds)
    return f"for {seconds:g} s"


def trouble(kind: str) -> Strike:
    """Return a fault that affects the next one to four workers that are started.

    Args:
        kind: "exits" at once, "never" attaches to the control plane, or starts "late".
    """

    def strike(cluster: "Cluster") -> str:
        count = cluster.rng.choice([1, 1, 2, 4])
        cluster.trouble += [kind] * count
        return f"{count} to come"

    return strike


def echo(cluster: "Cluster") -> str:
    """Deliver an old report to the decision code again. The protocol excludes this; the report must have no effect."""
    if not cluster.plane.said:
        return ""
    report = cluster.rng.choice(cluster.plane.said[-40:])
    cluster.plane.echo(report)
    return m.encode(report)[:120]


def echo_later(cluster: "Cluster") -> str:
    """During recoveries, deliver old reports of the types that the control plane is waiting for, but of earlier epochs.

    The protocol excludes this; the reports must have no effect.
    """
    count = cluster.rng.randint(2, 6)

    def repeat(order: Any) -> None:
        nonlocal count
        kinds = _AWAITED.get(type(order), ())
        said = [report for report in cluster.plane.said if isinstance(report, kinds) and report.epoch < order.epoch]
        if said and count:
            count -= 1
            delay = cluster.rng.choice([0.0, 0.02, 0.1, 0.4])
            cluster.time.after(delay, cluster.plane.echo, cluster.rng.choice(said[-8:]))

    cluster.on_order.append(repeat)
    return f"up to {count}"


def echo_order(cluster: "Cluster", worker: "Worker") -> str:
    """Deliver an old order of an epoch to a worker again. The protocol excludes this; the order must have no effect."""
    received = cluster.plane.log[: worker.agent.link.position]
    old = [order for order in received if isinstance(order, tuple(_AWAITED))]
    if not old or not worker.attached:
        return "no order yet to "
    order = cluster.rng.choice(old[-12:])
    worker.hear(order)
    return f"{type(order).__name__} of epoch {order.epoch} to "


def echo_orders_later(cluster: "Cluster") -> str:
    """During recoveries, deliver old orders of earlier epochs to the workers.

    The protocol excludes this; the orders must have no effect.
    """
    count = cluster.rng.randint(2, 6)

    def repeat(order: Any) -> None:
        nonlocal count
        workers = [w for w in cluster.workers() if w.attached] if isinstance(order, m.Close | m.Open | m.Repair) else []
        if workers and count:
            count -= 1
            delay = cluster.rng.choice([0.02, 0.1, 0.4])
            cluster.time.after(delay, echo_order, cluster, cluster.rng.choice(workers))

    cluster.on_order.append(repeat)
    return f"up to {count}"


# --- kinds and schedule -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind(engine.Kind):
    """A kind of fault. ``strike`` returns a description of the target, or "" if the cluster has no target for it.

    Attributes:
        may_end_control: whether the fault may end the control plane's process, so that a journal is needed.
        at_worst: the strongest reaction of the control plane that is allowed if this is the only fault of the run and
            strikes during training.
        noticed_s: virtual seconds within which the epoch must then be closed, if it is closed.
    """

    may_end_control: bool = False
    at_worst: str = ANYTHING
    noticed_s: float = 1e9


# The docstrings in ``strikes`` describe the effect of each kind.
KINDS = (
    Kind("kill", 10, on_worker(kill, early=True), at_worst=HOT_SWAP, noticed_s=0.5),
    Kind("kill two at once", 3, kill_two),
    Kind("kill a rank and its copy", 2, kill_copies),
    Kind("exit with code 1", 1, on_worker(exits(1), early=True)),
    Kind("exit with code 0", 1, on_worker(exits(0), early=True), at_worst=HOT_SWAP, noticed_s=6.0),
    Kind("stop", 3, on_worker(stop), at_worst=HOT_SWAP, noticed_s=1.0),
    Kind("pause", 4, on_worker(pause, early=True), at_worst=HOT_SWAP, noticed_s=1.0),
    Kind("hang without heartbeat", 2, on_worker(fall_deaf), at_worst=HOT_SWAP, noticed_s=11.0),
    Kind("hang with heartbeat", 3, on_worker(spin), at_worst=HOT_SWAP, noticed_s=14.0),
    Kind("straggle", 2, on_worker(straggle), at_worst=HOT_SWAP, noticed_s=14.0),
    Kind(
        "raise recoverable error",
        3,
        on_training(raises("RecoverableError")),
        at_worst=IN_PLACE,
        noticed_s=2.0,
    ),
    Kind(
        "raise replace-node error",
        2,
        on_training(raises("ReplaceNodeError")),
        at_worst=HOT_SWAP,
        noticed_s=2.0,
    ),
    Kind("raise software error", 0.7, on_training(raises("ValueError"))),
    Kind("raise recoverable errors for ever", 1, on_training(ail)),
    Kind("a step that kills its worker", 0.7, on_training(poison("kill"))),
    Kind("a step that is a software error", 0.7, on_training(poison("ValueError"))),
    Kind("lose a report", 2, on_worker(mumble), at_worst=NOTHING),
    Kind("reset a connection", 3, on_training(reset), at_worst=IN_PLACE, noticed_s=2.5),
    Kind("lose a message for good", 1, on_training(stick), at_worst=IN_PLACE, noticed_s=10.0),
    Kind("damage an own snapshot", 2, on_training(damage_own), at_worst=NOTHING),
    Kind("damage a peer copy", 2, on_training(damage_copy), at_worst=NOTHING),
    Kind("kill an agent", 2, on_agent(kill_agent), may_end_control=True),
    Kind("an agent ends", 0.7, on_agent(agent_ends), may_end_control=True),
    Kind("pause an agent", 2, on_agent(pause_agent)),
    Kind("tell an agent to end", 0.15, on_agent(tell_to_end)),
    Kind("power off a node", 1.5, on_agent(power_off), may_end_control=True),
    Kind("power cycle a node", 2, on_agent(power_cycle), may_end_control=True),
    Kind("cut a node off", 3, on_agent(cut)),
    Kind("cut a node off one way", 2, on_agent(cut_one_way)),
    Kind("flapping link", 1, on_agent(flap)),
    Kind("slow link", 1, on_agent(slow_link)),
    Kind("kill the control plane", 4, control_dies, may_end_control=True, at_worst=NOTHING),
    Kind("pause the control plane", 2, control_pauses, may_end_control=True, at_worst=NOTHING),
    Kind("workers start late", 1.5, trouble("late")),
    Kind("workers do not start", 1.5, trouble("exits")),
    Kind("workers hang at the start", 0.7, trouble("never")),
    Kind("repeat an old report", 3, echo, at_worst=NOTHING),
    Kind("repeat reports of an earlier epoch", 4, echo_later, at_worst=NOTHING),
    Kind("repeat an old order", 2, on_worker(echo_order), at_worst=NOTHING),
    Kind("repeat orders of an earlier epoch", 3, echo_orders_later, at_worst=NOTHING),
)
HARMLESS = (
    "repeat an old report",
    "repeat reports of an earlier epoch",
    "repeat an old order",
    "repeat orders of an earlier epoch",
)
"""Kinds of faults that cannot justify any reaction of the control plane."""
_PAUSES_S = (0.0, 0.0, 0.02, 0.2, 1.0, 3.0, 8.0)
"""Virtual seconds between two timed faults, before a random factor."""
_BEGIN_S = (0.0, 2.0, 4.0, 6.0, 9.0)
"""Virtual seconds from the start of a run until its first timed fault."""
_AFTERWARDS_S = 4.0
"""A run lasts so many virtual seconds longer than its last timed fault, so that the consequences of the fault are over
before the run ends.
"""
_AGAIN_S = 1.0
"""Virtual seconds until a fault that has found no target is tried again."""
_AMBUSH_S = (0.0, 0.005, 0.05, 0.2, 0.6)
"""Virtual seconds from an order to a fault that is triggered by the order."""


class Schedule:
    """The faults of one run: timed faults at drawn times, the others shortly after an order, while a recovery is in
    progress.

    Attributes:
        kinds: the faults to inject.
        struck: (kind, phase of the control plane) of each injected fault.
        alone: (``at_worst``, target, true time until which an epoch must be closed) of the last fault;
            ``at_worst`` is ``ANYTHING`` unless it is the run's only fault and struck during training.
    """

    def __init__(self, rng: random.Random, most: int, names: tuple[str, ...] | None = None):
        count = rng.choice([n for n in (0, 1, 1, 1, 2, 2, 3, 4, 6, 9, *range(10, most + 1)) if n <= most])
        self.kinds = engine.draw(rng, KINDS, names, count)
        self._ambushes = [kind for kind in self.kinds if rng.random() < 0.45] if count > 1 else []
        self._timed = [kind for kind in self.kinds if kind not in self._ambushes]
        self.struck: list[tuple[str, str]] = []
        self.alone = (ANYTHING, "", 0.0)

    @property
    def may_end_control(self) -> bool:
        return any(kind.may_end_control for kind in self.kinds)

    def begin(self, cluster: "Cluster") -> None:
        """Schedule the timed faults, and let the others wait for an order."""
        when = cluster.rng.choice(_BEGIN_S)
        for kind in self._timed:
            when += cluster.rng.choice(_PAUSES_S) * cluster.rng.uniform(0.5, 1.5)
            cluster.time.after(when, self._strike, cluster, kind)
        cluster.calm_at = max(cluster.calm_at, when)
        cluster.lengthen(when + _AFTERWARDS_S)
        if self._ambushes:
            cluster.on_order.append(lambda order: self._lie_in_wait(cluster, order))

    def _lie_in_wait(self, cluster: "Cluster", order: Any) -> None:
        interesting = isinstance(order, m.Close | m.Open | m.Repair | m.Resume | m.Restart | m.Spawn)
        if self._ambushes and interesting and cluster.struck and cluster.rng.random() < 0.4:
            kind = self._ambushes.pop()
            cluster.time.after(cluster.rng.choice(_AMBUSH_S), self._strike, cluster, kind)

    def _strike(self, cluster: "Cluster", kind: Kind, tries: int = 8) -> None:
        """Inject a fault now; without a target for the fault, try again later, at most ``tries`` times."""
        if cluster.plane.state.phase == ENDED:
            return
        phase = cluster.plane.state.phase if cluster.plane.is_up else "control plane away"
        before = len(cluster.struck)
        if kind.name not in HARMLESS:
            cluster.struck.append((cluster.time.now, kind.name))
        whom = kind.strike(cluster)
        if not whom:
            del cluster.struck[before:]
            if tries:
                cluster.time.after(_AGAIN_S, self._strike, cluster, kind, tries - 1)
            return
        cluster.note("FAULT {}: {}", kind.name, whom)
        cluster.lasts(0.0)
        self.struck.append((kind.name, phase))
        has_snapshots = cluster.checks.committed > cluster.load(cluster.plane.state.epoch)[0]
        is_alone = len(self.struck) == 1 and phase == RUNNING and has_snapshots and cluster.shape.hot_swap
        limit = cluster.time.now + kind.noticed_s
        self.alone = (kind.at_worst, whom, limit) if is_alone else (ANYTHING, whom, limit)
