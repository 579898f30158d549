"""Models of an agent (``ft.job.agent``), of its host, and of its connection to the control plane.

The agent sends the messages that a real one sends: reports about its workers, and heartbeats; it executes the orders.
It numbers its reports and keeps each one until the control plane has acknowledged it. The orders are a numbered log
that the agent follows. Within one connection, reports and orders arrive in sequence. A broken connection loses the
messages in transit. The next connection starts by sending all kept reports, which repeats the reports that arrived
without an acknowledgement. Heartbeats are not numbered, and a lost heartbeat is not repeated.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ft.job import messages as m
from ft.job.agent import control_plane
from ft.job.agent.workforce import is_silent
from ft.job.messages import AgentBeat
from tests.simulation.control.snapshots import CopyStore
from tests.simulation.control.worker import Worker
from tests.simulation.engine import Lane

if TYPE_CHECKING:
    from tests.simulation.control.cluster import Cluster

# --- connection -------------------------------------------------------------------------------------------------------

_LATENCY_S, _RETRY_S, _LOST_ANSWERS = (0.0005, 0.01), (0.1, 0.4), 0.1


class Link:
    """The connection of one agent, from the agent's start to its end. Each direction breaks and reconnects on its own.

    Attributes:
        position: number of orders that the agent has received.
        contact_at: true time in seconds at which the control plane last answered.
    """

    def __init__(self, cluster: "Cluster", agent: "Agent"):
        self._cluster, self._agent = cluster, agent
        self._kept: deque[tuple[int, Any]] = deque()
        self._number = self._sent = self.position = 0  # last report; orders sent; orders received
        self._up = self._down = 0  # numbers of the current connections; a message of an earlier one is lost
        self._up_works = self._down_works = True
        self._upward, self._downward = Lane(cluster.time), Lane(cluster.time)
        self.contact_at = cluster.time.now

    # --- reports -----------------------------------------------------------------------------------------------------

    def post(self, report: Any) -> None:
        """Send a report; unless it is a heartbeat, keep it until it is acknowledged."""
        if isinstance(report, AgentBeat):
            if self._up_works:
                self._send(0, report)
            return
        self._number += 1
        self._kept.append((self._number, report))
        if self._up_works:
            self._send(self._number, report)

    def taken(self, number: int) -> None:
        """Handle an acknowledgement, which may be lost: the journal has every report up to ``number``."""
        if self._cluster.rng.random() < _LOST_ANSWERS:
            return
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def _send(self, number: int, report: Any) -> None:
        self._upward.send(self._latency(), self._arrives, self._up, number, report)

    def _arrives(self, connection: int, number: int, report: Any) -> None:
        if connection != self._up:
            return
        if not self._passes("up"):
            self._break_up()
            return
        self._cluster.plane.hear(self, self._agent.node, number, report)
        if self._passes("down"):  # the control plane's answer arrives at the agent
            self.contact_at = self._cluster.time.now

    def _break_up(self) -> None:
        self._up, self._up_works = self._up + 1, False
        self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_up)

    def _connect_up(self) -> None:
        if not self._agent.alive or self._up_works:
            return
        if not self._passes("up"):
            self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_up)
            return
        self._up_works = True
        for number, report in self._kept:
            self._send(number, report)

    # --- orders ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send the orders that the agent has not received."""
        log = self._cluster.plane.log
        while self._down_works and self._sent < len(log):
            self._downward.send(self._latency(), self._delivers, self._down, self._sent, log[self._sent])
            self._sent += 1

    def _delivers(self, connection: int, number: int, order: Any) -> None:
        if connection != self._down:
            return
        if not self._cluster.can_talk(self._agent.host, "down"):
            self._break_down()
            return
        self.position = number + 1
        self._agent.when_awake(self._agent.obey, order)

    def _break_down(self) -> None:
        self._down, self._down_works = self._down + 1, False
        self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_down)

    def _connect_down(self) -> None:
        if not self._agent.alive or self._down_works:
            return
        if not self._passes("down"):
            self._cluster.time.after(self._cluster.rng.uniform(*_RETRY_S), self._connect_down)
            return
        self._down_works, self._sent = True, self.position
        self.pump()

    # --- both directions ---------------------------------------------------------------------------------------------

    def control_ended(self) -> None:
        """Break both directions, because the control plane's process has ended."""
        if self._up_works:
            self._break_up()
        if self._down_works:
            self._break_down()

    def _passes(self, direction: str) -> bool:
        """Return whether a message passes now, "up" to the control plane or "down" to the agent."""
        return self._cluster.plane.is_up and self._cluster.can_talk(self._agent.host, direction)

    def _latency(self) -> float:
        return self._cluster.rng.uniform(*_LATENCY_S) + self._agent.host.lag_s(self._cluster.time.now)


# --- host and agent ---------------------------------------------------------------------------------------------------

_TICK_S, _REAP_S, _FORK_S, _FREE_S = 0.1, (0.0005, 0.02), (0.005, 0.1), (0.05, 3.0)
"""Durations in virtual seconds: the agent's polling period; the time (least, most) until it reaps an ended process; the
time (least, most) until a started process exists; the time (least, most) until the memory of an ended process's device
is free.
"""


@dataclass(frozen=True)
class HostClock:
    """A host's monotonic clock.

    Attributes:
        offset: value of the clock at true time 0, in seconds.
        rate: speed of the clock relative to true time, about 1.
    """

    offset: float
    rate: float

    def read(self, now: float) -> float:
        """Return what the clock shows at true time ``now``, in seconds."""
        return self.offset + self.rate * now

    def true(self, seconds: float) -> float:
        """Return how long ``seconds`` on this clock are in true time, in seconds."""
        return seconds / self.rate


class Host:
    """A machine, on which agents run one after the other. True time is the time of the simulation's event queue.

    Attributes:
        number: number of the host.
        clock: monotonic clock of the host.
        skew_s: error of the host's wall clock, in seconds.
        is_down: True while the host has no power.
        slow_until: true time until which the network is slow.
        slow_s: additional latency of the slow network, in seconds.
        lives: number of agents that have run on the host.
    """

    def __init__(self, number: int, clock: HostClock, skew_s: float):
        self.number, self.clock, self.skew_s, self.is_down = number, clock, skew_s, False
        self.slow_until = self.slow_s = 0.0
        self.lives = 0

    def lag_s(self, now: float) -> float:
        """Return the additional latency of the host's network at true time ``now``, in seconds."""
        return self.slow_s if now < self.slow_until else 0.0


class Agent:
    """One agent process, from its start to its end.

    Attributes:
        node: name of the agent; each agent on the same host has another name.
        seats: number of workers with a logical rank that the agent announces to the control plane.
        standbys: number of standbys that the agent announces.
        alive: False once the process has ended.
        paused: True while the process is stopped.
        excuse: True once a fault has been injected that may make the control plane take the agent for lost.
        devices: number of devices of the host; 0: workers need none.
        in_use: worker -> its device, until the worker's process has ended and the device's memory is free.
        kept: logical rank -> the snapshots that its ended workers have left on this node, until training goes on.
        workers: name -> worker, of the workers that are not yet reaped.
        link: connection to the control plane.
    """

    def __init__(self, cluster: "Cluster", host: Host, seats: int, standbys: int):
        self.cluster, self.host = cluster, host
        self.node = f"n{host.number}" + ("" if host.lives == 0 else f"-{host.lives + 1}")
        host.lives += 1
        self.seats, self.standbys, self.devices = seats, standbys, cluster.shape.devices
        self.in_use: dict[str, int] = {}
        self.alive, self.paused, self.excuse = True, False, False
        self.workers: dict[str, Worker] = {}
        self.kept: dict[int, list[CopyStore]] = {}
        self._handed: dict[int, Worker] = {}
        self._started, self._restart, self._begin = 0, 0, None
        self._backlog: list[tuple[Callable[..., None], tuple]] = []
        self.link = Link(cluster, self)

    def join(self) -> None:
        """Announce the agent to the control plane, and begin to send heartbeats."""
        self.cluster.agents[self.node] = self
        number = self.host.number
        joined = m.AgentJoined(self.node, number, f"host{number}", self.seats, self.standbys, devices=self.devices)
        self.link.post(joined)
        self.link.pump()
        self._beat()

    # --- process -----------------------------------------------------------------------------------------------------

    def when_awake(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run the action now, or when the paused agent resumes."""
        if self.paused:
            self._backlog.append((action, arguments))
        elif self.alive:
            action(*arguments)

    def go_on(self) -> None:
        """Resume after a pause, and execute the actions that became due during the pause."""
        self.paused = False
        self._fence()
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self.when_awake(action, *arguments)

    def die(self, silently: bool) -> None:
        """End the agent and its workers; ``silently``: the host is lost, so that no peer sees a connection reset."""
        self.alive, self.excuse = False, True
        for worker in list(self.workers.values()):
            worker.alive = False
            self.cluster.mesh.lost(worker, noticed=0.0 if silently else 0.6)
        self.workers.clear()

    def given_up(self) -> None:
        """Handle the order that declares this node lost: end, and let a new agent join from this host under a new
        name.
        """
        if not self.alive:
            return
        self.die(silently=False)
        if not self.host.is_down:
            self.cluster.comes_back(self.host, self.seats + self.standbys)

    def _fence(self) -> None:
        """End the agent if it is cut off from a running control plane, which may give its logical ranks to others
        (fencing, ``ft.job.agent.control_plane``).
        """
        plane, now, rate = self.cluster.plane, self.cluster.time.now, self.host.clock.rate
        if not self.alive or not self.workers or not plane.is_up:
            return
        silent_s, serving_s = (now - self.link.contact_at) * rate, (now - plane.serves_since) * rate
        what, why = control_plane.decide(
            control_plane.ControlPlaneView(silent_s, 0.0, serving_s, turn=0), self.cluster.timeouts
        )
        if what == control_plane.FENCE:
            self.cluster.note("{}: {}, and ends its workers", self.node, why)
            self.given_up()

    def told_to_end(self, signum: int) -> None:
        """Handle a signal from the user or the scheduler: report it, and end the workers."""
        self.link.post(m.AgentLeaving(self.node, signum))
        for worker in list(self.workers.values()):
            self.ended(worker, -signum)

    def _beat(self) -> None:
        """Send a heartbeat with the state of every attached worker, and schedule the next one."""
        if not self.alive:
            return
        now = self.cluster.time.now
        if not self.paused:
            self._fence()
        if self.alive and not self.paused:
            self.link.post(m.AgentBeat(self.node, {w.name: w.beat(now) for w in self.workers.values() if w.attached}))
        self.cluster.time.after(self.host.clock.true(self.cluster.timeouts.agent_beat_s), self._beat)

    # --- workers -----------------------------------------------------------------------------------------------------

    def hear(self, report: Any) -> None:
        """Forward a report from a worker."""
        self.when_awake(self.link.post, report)

    def spawn(self, rank: int | None, local_rank: int = 0) -> None:
        """Start a worker that is meant for a logical rank, with a device; ``rank`` None: a standby."""
        name = f"{self.node}.w{self._started}"
        self._started += 1
        worker = self.workers[name] = Worker(self.cluster, self, name, rank, self._restart)
        if rank is not None:
            self.in_use[name] = local_rank
        self.cluster.born(worker)
        self.cluster.time.after(self.cluster.rng.uniform(*_FORK_S), self._exists, worker)

    def _exists(self, worker: Worker) -> None:
        if not self.alive:
            return
        pid, device = 1000 + self._started, self.in_use.get(worker.name, 0)
        self.hear(m.WorkerStarted(worker.name, self.node, pid, worker.started_for, worker.restart, device))
        if worker.alive:
            worker.poke()

    def ended(self, worker: Worker, code: int, keep: bool = False) -> None:
        """End a worker's process; it is reaped a moment later. ``keep``: its snapshots are kept, whatever the code."""
        if not worker.alive:
            return
        worker.alive = False
        if worker.rank >= 0 and (keep or code not in (0, -9)):
            self.kept.setdefault(worker.rank, []).append(worker.stock)
        self.cluster.mesh.lost(worker, noticed=0.6)
        delay = _FORK_S[1] + self.cluster.rng.uniform(*_REAP_S) if not worker.attached else 0.0
        delay += self.cluster.rng.uniform(*_REAP_S)
        self.cluster.time.after(delay, self.when_awake, self._reap, worker, code)

    def _reap(self, worker: Worker, code: int) -> None:
        if self.workers.pop(worker.name, None) is not None:
            self.link.post(m.WorkerExited(worker.name, self.node, code, worker.attached))
            if self.devices and worker.name in self.in_use:
                self.cluster.time.after(self.cluster.rng.uniform(*_FREE_S), self.when_awake, self._release, worker)
            else:
                self.in_use.pop(worker.name, None)
            self._begin_when_possible()

    def _release(self, worker: Worker) -> None:
        """Report that the memory of an ended worker's device is free."""
        self.link.post(m.DeviceReleased(worker.name, self.node, self.in_use.pop(worker.name)))
        self._begin_when_possible()

    def watch(self, worker: Worker, state: str) -> None:
        """Watch a worker whose heartbeats have just stopped, and report it if that lasts; ``state``: as in /proc."""
        timeouts, since = self.cluster.timeouts, worker.quiet_since
        limit = timeouts.stopped_s if state == "T" else timeouts.silent_s
        wait = self.host.clock.true(limit) + self.cluster.rng.uniform(0.0, _TICK_S)
        self.cluster.time.after(wait, self.when_awake, self._judge, worker, since, state)

    def _judge(self, worker: Worker, since: float, state: str) -> None:
        is_quiet = (worker.stopped or worker.deaf) and worker.quiet_since == since
        if not is_quiet or not worker.alive or not worker.attached:
            return
        quiet_s = self.host.clock.read(self.cluster.time.now) - self.host.clock.read(since)
        if is_silent(quiet_s, state, self.cluster.timeouts):
            self.link.post(m.WorkerSilent(worker.name, self.node, round(quiet_s, 3), state))

    # --- orders ------------------------------------------------------------------------------------------------------

    def obey(self, order: Any) -> None:
        """Execute an order, like ``ft.job.agent.agent.Agent._obey``."""
        if isinstance(order, m.Kill):
            if order.worker in self.workers:
                self.ended(self.workers[order.worker], -9, keep=True)
        elif isinstance(order, m.Spawn):
            for _ in range(order.count if order.node == self.node else 0):
                self.spawn(None)
        elif isinstance(order, m.Restart):
            self._begin, self._restart = order.ranks.get(self.node, []), order.number
            self._kill_all()
            self._begin_when_possible()
        elif isinstance(order, m.Stop):
            self._kill_all()
        elif isinstance(order, m.GivenUp):
            if order.node == self.node:
                self.given_up()
        elif isinstance(order, m.Close | m.Open | m.Repair | m.Resume | m.Finish):
            if isinstance(order, m.Open):
                seats = (seat for seat in order.seats.values() if seat.worker in self.workers)
                self.in_use.update({seat.worker: seat.local_rank for seat in seats})
                self._hand_over({rank: seat.worker for rank, seat in order.seats.items()})
            if isinstance(order, m.Resume):
                self.kept, self._handed = {}, {}
            for worker in list(self.workers.values()):
                if worker.attached and worker.alive:
                    worker.hear(order)

    def _hand_over(self, seats: dict[int, str]) -> None:
        """Have workers take over the kept snapshots, as ``ft.job.agent.workforce.Workforce.hand_over_snapshots`` does.

        ``seats``: logical rank -> the worker that is about to hold it.
        """
        here = {rank: w for rank, name in seats.items() if (w := self.workers.get(name)) and w.attached and w.alive}
        for rank, kept in sorted(self.kept.items()):
            receiver, before = here.get(rank, next(iter(here.values()), None)), self._handed.get(rank)
            is_stale = rank not in here and seats[rank].startswith(f"{self.node}.")
            if receiver is None or is_stale or (before not in (None, receiver) and before.alive):
                continue
            self._handed[rank] = receiver
            for left in kept:
                receiver.stock.inherit(left, rank, here.get(rank) is receiver)
            if receiver is not here.get(rank):
                self.hear(m.WorkerInherited(receiver.name, receiver.stock.held()))

    def _kill_all(self) -> None:
        for worker in list(self.workers.values()):
            self.ended(worker, -9)

    def start_first(self, ranks: list[int]) -> None:
        """Start the run's first workers on this node, one for each of the logical ranks."""
        self._begin = ranks
        self._begin_when_possible()

    def _begin_when_possible(self) -> None:
        if self._begin is None or self.workers or self.in_use:
            return
        ranks, self._begin, self.kept, self._handed = self._begin, None, {}, {}
        for local_rank, rank in enumerate(ranks):
            self.spawn(rank, local_rank)
