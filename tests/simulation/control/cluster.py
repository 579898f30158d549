"""The simulated cluster: hosts with agents and workers, networks, the control plane, faults.

An agent is the supervisor process of a node; a worker is a training process. An epoch is a version of the map from
logical ranks to workers. A simulated run is called a history; the history of a training state is a hash over the steps
that led to the state.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft.job import messages as m
from ft.job.control.state import Options
from tests.simulation.control.agent import Agent, Host
from tests.simulation.control.checks import Checks
from tests.simulation.control.clock import HostClock, Timeline
from tests.simulation.control.mesh import Mesh
from tests.simulation.control.plane import Plane
from tests.simulation.control.shape import TIMEOUTS, Habits, Shape
from tests.simulation.control.worker import Worker

_JOIN_S, _RETURN_S = (0.0, 1.0), (0.2, 3.0)
_RESTARTED_S, _MOVED_S = (0.1, 1.0), (1.0, 4.0)
_SKEW_S = (-5.0, 5.0)
"""Durations as (least, most) virtual seconds: until an agent joins at the start, until an agent joins again, until the
control plane is started again on its host and on another host; and the error of a host's wall clock.
"""


class Cluster:
    """The state of one simulated run.

    Args:
        rng: source of all randomness.
        shape: parameters of the run.
        journal: path for the control plane's journal; None if the control plane will not die.
        history: event log to append to, None if no log is needed.

    Attributes:
        history: the event log.
        agents: node -> agent, including dead agents.
        everyone: worker name -> worker, including dead workers.
        trouble: faults of the next workers to start: "exits": the worker exits at once; "never": it never attaches to
            its agent; "late": it starts late.
        calm_at: true time at which the last fault is over.
        returning: number of agents that are about to join again.
        poisoned: (logical rank, step) -> fault of every worker that executes that step in that rank.
        struck: (true time, kind) of each fault so far.
        checkpoint: (step, history) of the newest complete checkpoint.
        on_order: callbacks that are called with every published order.
    """

    def __init__(self, rng: random.Random, shape: Shape, journal: Path | None, history: list[str] | None):
        self.rng, self.shape, self.history = rng, shape, history
        self.time, self.timeouts, self.habits = Timeline(), TIMEOUTS, Habits()
        clocks = [HostClock(rng.uniform(0.0, 1e5), rng.uniform(0.97, 1.03)) for _ in shape.nodes]
        self.hosts = [Host(i, clock, rng.uniform(*_SKEW_S)) for i, clock in enumerate(clocks)]
        self.checks, self.mesh = Checks(self), Mesh(self)
        self.agents: dict[str, Agent] = {}
        self.everyone: dict[str, Worker] = {}
        self.trouble: list[str] = []
        self.struck: list[tuple[float, str]] = []
        self.calm_at, self.crashes, self._cut_until = 0.0, 0, 0.0
        self.returning = 0
        self.poisoned: dict[tuple[int, int], str] = {}
        self.checkpoint, self._saves, self._loads = (0, 0), {}, {}
        self.on_order: list[Callable[[Any], None]] = []
        options = Options(
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

    def note(self, text: str, *values: Any) -> None:
        """Append a line to the event log."""
        if self.history is not None:
            self.history.append(f"{self.time.now:10.4f}  {text.format(*values)}")

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

    def is_deserted(self) -> bool:
        """Return whether no agent is alive, and none will join."""
        return self.time.now > self.calm_at and not self.returning and not self.living()

    # --- networks ----------------------------------------------------------------------------------------------------

    def cut(self, host: Host, directions: tuple[str, ...], seconds: float) -> None:
        """Cut the host's network in the given directions for ``seconds`` virtual seconds."""
        for direction in directions:
            host.cut[direction] = max(host.cut[direction], self.time.now + seconds)
        self._cut_until = max(self._cut_until, self.time.now + seconds)
        self.time.after(seconds + 0.001, self.mesh.look_again)

    def cut_nodes(self) -> set[str]:
        """Return the nodes whose workers can reach no other node."""
        now = self.time.now
        if now >= self._cut_until:
            return set()
        return {node for node, agent in self.agents.items() if agent.host.is_cut(now)}

    def can_reach(self, node: str, other: str) -> bool:
        """Return whether workers of the two nodes can reach each other."""
        cut = self.cut_nodes()
        return not cut or self.agents[node].host is self.agents[other].host or not {node, other} & cut

    def can_talk(self, host: Host, direction: str) -> bool:
        """Return whether messages pass between the host's agent and the control plane; "up" is to the control plane."""
        here, now = self.plane.host, self.time.now
        if host is here:
            return True
        back = "down" if direction == "up" else "up"
        return host.cut[direction] <= now and here.cut[back] <= now and not here.is_down

    # --- the control plane -------------------------------------------------------------------------------------------

    def control_ended(self) -> None:
        """Handle the end of the control plane's process: schedule its successor."""
        self.crashes += 1
        self.note("the control plane dies")
        for agent in self.living():
            agent.link.control_ended()
        homes = [agent.host for agent in self.living() if not agent.paused and not agent.host.is_cut(self.time.now)]
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
        self.calm_at = max(self.calm_at, self.time.now)
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
