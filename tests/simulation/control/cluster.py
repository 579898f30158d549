"""The simulated cluster: hosts with agents and workers, networks, the control plane, faults.

An agent is the supervisor process of a node; a worker is a training process. An epoch is a version of the map from
logical ranks to workers. A simulated run is called a history; the history of a training state is a hash over the steps
that led to the state.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft.job import messages as m
from ft.job.control.state import ENDED, ControlOptions
from tests.simulation.control.agent import Agent, Host, HostClock
from tests.simulation.control.checks import Checks, check_alone
from tests.simulation.control.faults import Schedule
from tests.simulation.control.plane import Plane
from tests.simulation.control.shape import TIMEOUTS, Habits, Shape
from tests.simulation.control.training import Mesh
from tests.simulation.control.worker import Worker
from tests.simulation.engine import History, World

_JOIN_S, _RETURN_S = (0.0, 1.0), (0.2, 3.0)
_RESTARTED_S, _MOVED_S = (0.1, 1.0), (1.0, 4.0)
_SKEW_S = (-5.0, 5.0)
"""Durations as (least, most) virtual seconds: until an agent joins at the start, until an agent joins again, until the
control plane is started again on its host and on another host; and the error of a host's wall clock.
"""


STUCK_S = 90.0
"""Virtual seconds without progress and without a fault that count as a hang: all deadlines of one recovery together."""
LONGEST_S = 3000.0
"""Virtual seconds after which a run counts as a hang in any case."""
_CATEGORIES = {
    "told to end": "an agent was told to end",
    "used up": "warm restarts used up",
    "cannot hold": "too few nodes left",
    "before training began": "node lost before training began",
    "came within": "agents missing at the start",
    "workers were announced": "agents missing at the start",
    "the same error": "software error again after a restart",
}
"""Part of the message of an order to stop -> outcome of the history."""


class Cluster(World):
    """The state of one simulated run.

    Args:
        rng: source of all randomness.
        shape: parameters of the run.
        schedule: the faults.
        journal: path for the control plane's journal; None if the control plane will not die.
        lines: event log to append to, None if no log is needed.

    Attributes:
        agents: node -> agent, including dead agents.
        everyone: worker name -> worker, including dead workers.
        trouble: faults of the next workers to start: "exits": the worker exits at once; "never": it never attaches to
            its agent; "late": it starts late.
        returning: number of agents that are about to join again.
        poisoned: (logical rank, step) -> fault of every worker that executes that step in that rank.
        checkpoint: (step, history) of the newest complete checkpoint.
        on_order: callbacks that are called with every published order.
    """

    def __init__(
        self, rng: random.Random, shape: Shape, schedule: Schedule, journal: Path | None, lines: list[str] | None
    ):
        super().__init__(rng, lines)
        self.shape, self._schedule, self.timeouts, self.habits = shape, schedule, TIMEOUTS, Habits()
        clocks = [HostClock(rng.uniform(0.0, 1e5), rng.uniform(0.97, 1.03)) for _ in shape.nodes]
        self.hosts = [Host(i, clock, rng.uniform(*_SKEW_S)) for i, clock in enumerate(clocks)]
        self.checks, self.mesh = Checks(self), Mesh(self)
        self.agents: dict[str, Agent] = {}
        self.everyone: dict[str, Worker] = {}
        self.trouble: list[str] = []
        self.crashes, self._cut_until = 0, 0.0
        self.returning = 0
        self.poisoned: dict[tuple[int, int], str] = {}
        self.checkpoint, self._saves, self._loads = (0, 0), {}, {}
        self.on_order: list[Callable[[Any], None]] = []
        options = ControlOptions(
            len(shape.nodes), shape.world_size, shape.max_restarts, hot_swap=shape.hot_swap, timeouts=self.timeouts
        )
        self.plane = Plane(self, self.hosts[0], options, journal)

    def start(self) -> None:
        """Let the agents join and start the first workers, and start the control plane."""
        first = 0
        for host, (seats, standbys) in zip(self.hosts, self.shape.nodes, strict=True):
            agent = Agent(self, host, seats, standbys)
            delay = self.rng.uniform(*_JOIN_S)
            self.time.after(delay, agent.join)
            self.time.after(delay + 0.1, agent.start_first, list(range(first, first + seats)))
            first += seats
        self.plane.start()
        self._schedule.begin(self)

    @property
    def has_ended(self) -> bool:
        return self.plane.state.phase == ENDED and self.plane.is_up

    def look(self) -> bool:
        """Check that the run does not hang; return whether no agent is alive, and none will join."""
        if self.time.now > self.calm_at and not self.returning and not self.living():
            return True
        if self.checks.is_stuck(STUCK_S) or self.time.now > LONGEST_S:
            state = self.plane.state
            self.checks.fail(
                f"a hang: {state.phase} for {self.plane.clock() - state.since:.1f} s; last progress at "
                f"{self.checks.progress_at:.1f} s, last fault at {self.calm_at:.1f}, now {self.time.now:.1f}"
            )
        return False

    def ended(self) -> None:
        check_alone(self, *self._schedule.alone)

    def sum_up(self, history: History) -> None:
        state, log = self.plane.state, self.plane.log
        history.struck = self._schedule.struck
        restarts = sum(isinstance(order, m.Restart) for order in log)
        history.messages = Counter(type(message).__name__ for message in (*self.plane.said, *log))
        history.counts.update(
            restarts=restarts, epochs=state.epoch + 1, redone=self.checks.redone, crashes=self.crashes
        )
        if history.violation:
            history.outcome = "VIOLATION"
        elif log and isinstance(log[-1], m.Finish):
            how = "finished" if not history.struck else "recovered and finished"
            history.outcome = "restarted and finished" if restarts else how
        elif not self.has_ended:
            history.outcome = "all nodes lost"
        else:
            history.outcome = "stopped: " + _category(log[-1].message)
        self.note("{}{}{}", history.outcome, ": " if history.violation else "", history.violation)

    def lengthen(self, seconds: float) -> None:
        """Make the run long enough to train for about ``seconds``."""
        self.habits = replace(self.habits, steps=max(self.habits.steps, int(seconds / self.habits.step_s)))

    # --- agents and workers ------------------------------------------------------------------------------------------

    def born(self, worker: Worker) -> None:
        """Register a new worker, and apply the next fault of ``trouble`` to it."""
        self.everyone[worker.name] = worker
        if self.trouble and (self.plane.state.attached or self.trouble[-1] != "never"):
            kind = self.trouble.pop()
            self.struck.append((self.time.now, "bad start"))
            self.calm_at = self.time.now
            worker.start, worker.slow = (kind, 1.0) if kind != "late" else ("ready", 4.0)
            self.note("{} will start badly: {}", worker.name, kind)

    def living(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.alive]

    def workers(self) -> list[Worker]:
        return [w for agent in self.living() for w in agent.workers.values() if w.alive]

    def workers_of(self, epoch: int) -> list[Worker]:
        return [w for w in self.workers() if w.epoch == epoch]

    def worker_in(self, name: str, asker: Worker) -> Worker | None:
        """Return the worker called ``name`` if it is alive and ``asker`` can reach it, otherwise None."""
        worker = self.everyone[name]
        return worker if worker.alive and self.can_reach(worker.node, asker.node) else None

    def comes_back(self, host: Host, room: int) -> None:
        """Start a new agent on a host that has lost its agent. It offers ``room`` standbys and no logical ranks."""
        agent = Agent(self, host, 0, max(1, room))
        self.note("host {} is back as {}", host.number, agent.node)
        self.returning += 1
        self.time.after(self.rng.uniform(*_RETURN_S), self._joins, agent)

    def _joins(self, agent: Agent) -> None:
        self.returning -= 1
        agent.join()

    # --- networks ----------------------------------------------------------------------------------------------------

    def cut(self, host: Host, directions: tuple[str, ...], seconds: float) -> None:
        """Cut the host's network in the given directions for ``seconds`` virtual seconds."""
        for direction in directions:
            self.network.cut((host, direction), seconds)
        self._cut_until = max(self._cut_until, self.time.now + seconds)
        self.time.after(seconds + 0.001, self.mesh.look_again)

    def cut_nodes(self) -> set[str]:
        """Return the nodes whose workers can reach no other node."""
        if self.time.now >= self._cut_until:
            return set()
        return {node for node, agent in self.agents.items() if self.is_cut(agent.host)}

    def is_cut(self, host: Host) -> bool:
        """Return whether the host's workers cannot reach other hosts; they need both directions."""
        return self.network.is_cut((host, "up")) or self.network.is_cut((host, "down"))

    def can_reach(self, node: str, other: str) -> bool:
        """Return whether workers of the two nodes can reach each other."""
        cut = self.cut_nodes()
        return not cut or self.agents[node].host is self.agents[other].host or not {node, other} & cut

    def can_talk(self, host: Host, direction: str) -> bool:
        """Return whether messages pass between the host's agent and the control plane; "up" is to the control plane."""
        here, back = self.plane.host, "down" if direction == "up" else "up"
        if host is here:
            return True
        return not (self.network.is_cut((host, direction)) or self.network.is_cut((here, back)) or here.is_down)

    # --- the control plane -------------------------------------------------------------------------------------------

    def control_ended(self) -> None:
        """Handle the end of the control plane's process: schedule its successor."""
        self.crashes += 1
        self.note("the control plane dies")
        for agent in self.living():
            agent.link.control_ended()
        homes = [agent.host for agent in self.living() if not agent.paused and not self.is_cut(agent.host)]
        if self.plane.host in homes and self.rng.random() < 0.6:
            self.time.after(self.rng.uniform(*_RESTARTED_S), self._control_back, self.plane.host)
        elif homes:
            self.time.after(self.rng.uniform(*_MOVED_S), self._control_back, self.rng.choice(homes))
        else:
            self.time.after(1.0, self.control_waits)

    def control_waits(self) -> None:
        """Start the control plane again on a random host with a running agent, as soon as there is one."""
        homes = [agent.host for agent in self.living() if not agent.paused]
        if homes:
            self._control_back(self.rng.choice(homes))
        else:
            self.time.after(1.0, self.control_waits)

    def _control_back(self, host: Host) -> None:
        if self.plane.is_up:
            return
        if host.is_down or not any(agent.host is host for agent in self.living()):
            self.control_waits()
            return
        self.note("the control plane is built again from its journal, on host {}", host.number)
        self.lasts(0.0)
        self.plane.restart(host)

    def ordered(self, order: Any) -> None:
        """Handle a published order: check it, and call the callbacks."""
        self.checks.ordered(order)
        if isinstance(order, m.Open):
            self.mesh.forget(order.epoch - 1)
        for act in self.on_order:
            act(order)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def saved(self, worker: Worker) -> None:
        """Record that the worker's part of its step's checkpoint is on disk."""
        _, step, history = worker.training.owned
        ranks = self._saves.setdefault((step, history), set())
        ranks.add(worker.rank)
        if len(ranks) == self.shape.world_size and step >= self.checkpoint[0]:
            self.checkpoint = (step, history)

    def load(self, epoch: int) -> tuple[int, int]:
        """Return the (step, history) of the checkpoint from which an epoch starts after a launch or warm restart.

        All workers of the epoch get the same answer.
        """
        return self._loads.setdefault(epoch, self.checkpoint)


def _category(message: str) -> str:
    for words in _CATEGORIES:
        if words in message:
            return _CATEGORIES[words]
    if "was killed by" in message or "exited with" in message:
        return "worker lost before any attached"
    return message[:80]
