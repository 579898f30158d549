"""A simulated cluster for the control plane: agents and workers that keep to the protocol, faults that do not.

Time is simulated. Messages between an agent and the control plane keep their sequence, those of different nodes do not;
some reports come a second time, later. A worker is a generator: it yields seconds to sleep, or None to sleep until an
order reaches it.
"""

import heapq
import itertools
import random

from ft import events
from ft import messages as m
from ft.control.controller import decide, next_deadline
from ft.control.state import ENDED, Options, State
from ft.control.timeouts import Timeouts

LIMITS = Timeouts(
    **{"stall_s": 3.0, "start_s": 10.0, "collective_s": 4.0, "drain_s": 5.0, "verdict_s": 8.0, "repair_s": 8.0},
    **{"assemble_s": 12.0, "ready_s": 20.0, "leave_s": 4.0, "join_s": 60.0},
).check()
STEP_S, BEAT_S = 0.2, 0.5
EXITS = (-9, -11, -9, -6)


class SimWorker:
    """What ``ft.worker`` does, as far as the control plane can see it."""

    def __init__(self, sim, node, name, meant):
        self.sim, self.node, self.name, self.meant = sim, node, name, meant
        self.alive, self.stopped, self.spins = True, False, False
        self.failing = None
        self.attached, self.assembled, self.trains, self.done = False, False, False, False
        self.rank, self.epoch, self.closed, self.closed_epoch = None, -1, False, -1
        self.empty, self.step, self.since = False, 0, sim.now
        self.own, self.copies = [], {}
        self.queue = []
        self.thread = self.live()

    def say(self, report):
        self.sim.post(self.node, report)

    def deliver(self, order):
        if isinstance(order, m.Close):
            self.closed_epoch = max(self.closed_epoch, order.epoch)
            if order.epoch >= self.epoch:
                self.closed = True
        self.queue.append(order)
        self.sim.at(0.0, self.go_on)

    def go_on(self):
        if not self.alive or self.stopped or self.spins or self.sleeping:
            return
        try:
            pause = next(self.thread)
        except StopIteration:
            self.sim.end(self, 0)
            return
        if pause is not None:
            self.sleeping = True
            self.sim.at(pause, self.wake)

    sleeping = False

    def wake(self):
        self.sleeping = False
        self.go_on()

    # --- the protocol, see ft.worker.guard and ft.worker.recovery ----------------------------------------------------

    def live(self):
        yield self.sim.delay(0.1, 3.0)
        self.attached = True
        self.say(m.WorkerReady(self.name, self.node, f"{self.name}:1"))
        fresh = yield from self.take_open()
        if fresh is None:
            return
        self.empty = not fresh
        yield self.sim.delay(0.1, 2.0) if self.sim.random.random() < 0.9 else self.sim.delay(6.0, 11.0)
        self.assembled = True
        if fresh:
            detail = {"dp_peers": {str(self.rank): [self.rank, self.rank ^ 1]}, "shards": {str(self.rank): [self.shard]}}
            self.say(m.Observed("layout", detail))
            self.step = self.sim.checkpoint
            self.begin()
        elif not (yield from self.recover()):
            return
        while True:
            while not self.closed and not self.failing and not self.done:
                yield None
            if self.done and not self.closed:
                self.say(m.WorkerDone(self.name, self.epoch, self.step))
                while not self.closed and not any(isinstance(order, m.Finish) for order in self.queue):
                    yield None
                if not self.closed:
                    return
            elif self.failing and not self.closed:
                self.say(m.WorkerFailed(self.name, self.epoch, self.step, [self.failing, "Exception"], "at random"))
                while not self.closed:
                    yield None
            self.trains, self.done, self.failing = False, False, None
            if not (yield from self.recover()):
                return

    @property
    def shard(self):
        return f"optimizer {self.rank}"

    def take_open(self):
        """True: a fresh epoch; False: joined; None: the run is over."""
        while True:
            while not self.queue:
                yield None
            order = self.queue.pop(0)
            if isinstance(order, m.Finish):
                return None
            if isinstance(order, m.Open) and order.epoch > self.epoch:
                for rank, seat in order.seats.items():
                    if seat.worker == self.name:
                        assert self.rank in (None, int(rank)), "seated as another rank than it was assembled for"
                        self.rank, self.epoch = int(rank), order.epoch
                        self.closed = self.closed_epoch >= order.epoch
                        return order.fresh

    def wait(self, kind):
        """The order of that kind for this epoch; None if the epoch is closed before."""
        while True:
            while not self.queue:
                yield None
            order = self.queue.pop(0)
            if isinstance(order, m.Close) and order.epoch >= self.epoch:
                return None
            if isinstance(order, kind) and order.epoch == self.epoch:
                return order

    def recover(self):
        """False: the run is over."""
        while True:
            if self.closed:
                yield self.sim.delay(0.01, 0.3)
                holdings = m.Holdings(list(self.own), {str(r): list(s) for r, s in self.copies.items()})
                self.say(m.WorkerReleased(self.name, self.epoch, self.step, self.groups(), holdings))
                if (yield from self.take_open()) is None:
                    return False
            if self.empty:
                self.say(m.WorkerArrived(self.name, self.epoch, self.groups()))
            order = yield from self.wait(m.Repair)
            if order is None:
                continue
            yield self.sim.delay(0.01, 0.5)
            if self.closed:
                continue
            source = order.sources[str(self.rank)]
            if self.sim.random.random() < self.sim.damage:
                self.sim.damage = 0.0
                said = m.WorkerFailed(self.name, self.epoch, self.step, ["FallbackError", "Exception"], "damaged")
                self.say(said)
                while not self.closed:
                    yield None
                continue
            self.step, self.empty, self.own = order.step, False, [order.step]
            how = "own" if source.owned == self.rank else f"copy:{source.owned}"
            said = (self.name, self.epoch, self.rank, self.step, f"{self.epoch}", [self.shard])
            self.say(m.WorkerRepaired(*said, 1, 1, 0, {"owned": how, "replicated": how}, 0.01, 0.02))
            if (yield from self.wait(m.Resume)) is None:
                continue
            self.begin()
            return True

    def begin(self):
        self.say(m.WorkerResumed(self.name, self.epoch, self.step))
        self.trains, self.since = True, self.sim.now
        self.own = sorted({*self.own, self.step})[-2:]

    def groups(self):
        return [m.GroupReport("world", list(range(self.sim.world_size)), True, False, 7)]

    def beat(self):
        doing, step_s = ("wait" if self.trains else "idle"), STEP_S if self.step > self.sim.checkpoint else None
        if self.spins or (self.trains and self.sim.gets_on()):
            doing = "compute"
        return m.Beat(0.0, self.epoch, self.step, doing, round(self.sim.now - self.since, 3), "world", step_s, 0)


class SimAgent:
    """What ``ft.agent`` does. ``cut_until``: the network is away until then."""

    def __init__(self, sim, node, number, seats, standbys):
        self.sim, self.node, self.number, self.seats, self.standbys = sim, node, number, seats, standbys
        self.alive, self.cut_until = True, 0.0
        self.workers, self.started, self.begins = {}, 0, None
        self.last_up = self.last_down = 0.0

    def spawn(self, rank):
        name = f"{self.node}.w{self.started}"
        self.started += 1
        worker = self.workers[name] = self.sim.ever[name] = SimWorker(self.sim, self.node, name, rank)

        def exist():
            if worker.alive:
                self.sim.post(self.node, m.WorkerStarted(name, self.node, 1000, rank))
                self.sim.at(0.0, worker.go_on)

        self.sim.at(self.sim.delay(0.01, 0.1), exist)

    def obey(self, order):
        if not self.alive:
            return
        if isinstance(order, m.Kill):
            if order.worker in self.workers:
                self.sim.end(self.workers[order.worker], -9)
        elif isinstance(order, m.Spawn):
            if order.node == self.node:
                for _ in range(order.count):
                    self.spawn(None)
        elif isinstance(order, m.Restart):
            for worker in list(self.workers.values()):
                self.sim.end(worker, -9)
            for rank in order.ranks.get(self.node, []):
                self.spawn(rank)
        elif isinstance(order, m.Stop):
            for worker in list(self.workers.values()):
                worker.alive = False
        else:
            for worker in list(self.workers.values()):
                if worker.attached:
                    worker.deliver(order)

    def beat(self):
        if self.alive:
            beats = {w.name: w.beat() for w in self.workers.values() if w.attached and not w.stopped}
            self.sim.post(self.node, m.AgentBeat(self.node, beats))
            self.sim.at(BEAT_S, self.beat)


class Sim:
    """One run from start to end.

    Attributes:
        orders: (when, order) of all orders. checkpoint: step that a warm restart begins at. ever: every worker that was.
    """

    def __init__(self, seed, steps=150):
        self.random, self.steps = random.Random(seed), steps
        self.world_size, nodes = 4, self.random.choice([1, 2, 2, 4])
        standby_nodes = self.random.choice([0, 0, 1])
        self.now, self._events, self._count = 100.0, [], itertools.count()
        self.checkpoint, self.damage = 0, 0.0
        self.state = State.begin(
            Options(nodes + standby_nodes, self.world_size, max_restarts=self.random.choice([1, 3, 9]), timeouts=LIMITS)
        )
        seats = self.world_size // nodes
        self.agents = {}
        for i in range(nodes + standby_nodes):
            count = self.random.choice([0, 1, 2]) if i < nodes else seats
            self.agents[f"n{i}"] = SimAgent(self, f"n{i}", i, seats if i < nodes else 0, count)
        self.orders, self.reasons, self.killed, self.exited = [], [], set(), set()
        self.ever = {}
        self.faults_left = self.ambushes = 0
        self.stuck_in = -1

    # --- machinery ---------------------------------------------------------------------------------------------------

    def at(self, seconds, action, *arguments):
        heapq.heappush(self._events, (self.now + seconds, next(self._count), action, arguments))

    def delay(self, least, most):
        return self.random.uniform(least, most)

    def post(self, node, report):
        """Over a network that keeps the sequence of one agent's messages, and repeats some."""
        agent = self.agents[node]
        when = max(self.now + self.delay(0.001, 0.02), agent.cut_until, agent.last_up)
        agent.last_up = when
        self.at(when - self.now, self.take, report)
        if self.random.random() < 0.02 and not isinstance(report, m.AgentBeat | m.WorkerStarted):
            self.at(when - self.now + self.delay(0.0, 5.0), self.take, report)

    def take(self, report):
        if isinstance(report, m.WorkerExited):
            self.exited.add(report.worker)
        for decision in decide(self.state, self.now, report):
            self.reasons.append(f"{self.now:.2f} {decision.reason}")
            for note in decision.events:
                self.check_event(note)
            for order in decision.orders:
                self.check_order(order)
                self.orders.append((self.now, order))
                if self.ambushes and isinstance(order, m.Close | m.Open | m.Repair | m.Resume):
                    self.ambush(order)
                for agent in self.agents.values():
                    when = max(self.now + self.delay(0.001, 0.02), agent.cut_until, agent.last_down)
                    agent.last_down = when
                    self.at(when - self.now, agent.obey, order)

    def clock(self):
        self.take(None)
        due = next_deadline(self.state, self.now)
        assert due > self.now
        self.at(due - self.now, self.clock)

    def end(self, worker, code):
        """The process ends; its agent sees it."""
        if not worker.alive:
            return
        worker.alive = False
        agent = self.agents[worker.node]
        agent.workers.pop(worker.name, None)
        self.post(worker.node, m.WorkerExited(worker.name, worker.node, code, worker.attached))

    def run(self, limit_s):
        for i, agent in enumerate(self.agents.values()):
            joined = m.AgentJoined(agent.node, i, f"host{i}", agent.seats, agent.standbys)
            self.at(self.delay(0, 1), self.post, agent.node, joined)
            self.at(1.0, agent.beat)
            first = sum(a.seats for a in list(self.agents.values())[:i])
            for rank in range(first, first + agent.seats):
                self.at(1.0, agent.spawn, rank)
        self.at(0.1, self.clock)
        self.at(STEP_S, self.train)
        until = self.now + limit_s
        while self._events and self.now < until and self.state.phase != ENDED:
            when, _, action, arguments = heapq.heappop(self._events)
            self.now = max(self.now, when)
            action(*arguments)

    # --- training ----------------------------------------------------------------------------------------------------

    def seated(self):
        """Those in seats as the workers themselves see it, of the newest epoch."""
        return [w for agent in self.agents.values() if agent.alive for w in agent.workers.values() if w.trains]

    def gets_on(self):
        here = self.seated()
        return (
            len(here) == self.world_size
            and {w.epoch for w in here} - {self.stuck_in} == {here[0].epoch}
            and not any(w.closed or w.stopped or w.spins or w.failing or w.done for w in here)
        )

    def train(self):
        """A step, if everybody takes part in it; its snapshots are safe with the peers at its end."""
        if self.gets_on():
            by_rank = {w.rank: w for w in self.seated()}
            for worker in by_rank.values():
                worker.step, worker.since = worker.step + 1, self.now
                worker.own = sorted({*worker.own, worker.step})[-2:]
                worker.copies = {worker.rank ^ 1: list(worker.own)}
                if worker.step % 50 == 0:
                    self.checkpoint = worker.step
                if worker.step >= self.steps and self.faults_left <= self.ambushes:
                    worker.done = True
                    self.at(0.0, worker.go_on)
        self.at(STEP_S, self.train)

    # --- faults ------------------------------------------------------------------------------------------------------

    def plan(self, faults):
        """Some faults by time, and the others a moment after an order, when a recovery is under way."""
        self.ambushes = self.random.randint(0, faults)
        self.faults_left = faults
        when = self.random.choice([2.0, 10.0, 20.0])
        for _ in range(faults - self.ambushes):
            when += self.random.choice([0.0, 0.02, 0.2, 1.0, 4.0, 15.0])
            self.at(when, self.fault)

    def ambush(self, order):
        if self.random.random() < 0.4 and (self.now > 115.0 or not order.fresh):
            self.ambushes -= 1
            self.at(self.random.choice([0.0, 0.05, 0.3, 1.0]), self.fault)

    def fault(self):
        self.faults_left -= 1
        everyone = [w for agent in self.agents.values() for w in agent.workers.values() if w.alive]
        if not everyone:
            return
        worker = self.random.choice(everyone)
        kinds = {self.die: 9, self.freeze: 3, self.spin: 4, self.leave: 1, self.say_damaged: 1, self.lose_node: 2}
        if worker.trains:
            kinds |= {self.fail: 3, self.suspect: 2, self.stand_still: 1}
        self.random.choices(list(kinds), list(kinds.values()))[0](worker)

    def die(self, worker):
        self.end(worker, self.random.choice(EXITS))

    def leave(self, worker):
        self.end(worker, self.random.choice([0, 1]))

    def freeze(self, worker):
        worker.stopped = True
        if worker.attached:
            self.at(0.3, self.post, worker.node, m.WorkerSilent(worker.name, worker.node, 0.3, "T"))

    def spin(self, worker):
        """It beats, and does nothing any more."""
        worker.spins, worker.since = True, self.now

    def fail(self, worker):
        worker.failing = self.random.choice(["RecoverableError", "ReplaceNodeError", "ValueError"])
        self.at(0.0, worker.go_on)

    def suspect(self, worker):
        worker.say(m.WorkerSuspects(worker.name, worker.epoch, "world", "Connection closed by peer"))

    def stand_still(self, worker):
        """A connection is dead and nobody notices."""
        self.stuck_in = worker.epoch

    def say_damaged(self, worker):
        self.damage = 0.5

    def lose_node(self, worker):
        """For a while or for ever; not that of the control plane, which would die with its agent."""
        agent = self.agents[worker.node]
        if worker.node == "n0":
            self.die(worker)
        elif self.random.random() < 0.5:
            agent.cut_until = self.now + self.random.choice([0.5, 2.0, 8.0])
        else:
            agent.alive = False
            for lost in agent.workers.values():
                lost.alive = False

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_event(self, note):
        event = events.observed(note.name, {"wall": 1.0, "monotonic": self.now, **note.values})
        events.check(event)

    def check_order(self, order):
        if isinstance(order, m.Kill):
            self.killed.add(order.worker)
        elif isinstance(order, m.Restart):
            self.killed |= {name for agent in self.agents.values() for name in agent.workers}
        elif isinstance(order, m.Open):
            names = [seat.worker for seat in order.seats.values()]
            assert len(names) == len(set(names)) == self.world_size, order
            assert not set(names) & (self.killed | self.exited), order
            devices = [(seat.node, seat.local_rank) for seat in order.seats.values()]
            assert len(devices) == len(set(devices)), order
        elif isinstance(order, m.Repair):
            self.check_sources(order)

    def check_sources(self, order):
        seats = {rank: self.ever[name] for rank, name in self.state.seats.items()}
        for text, source in order.sources.items():
            rank, holder = int(text), seats[source.owned]
            held = holder.own if source.owned == rank else holder.copies.get(rank, [])
            assert order.step in held, (order, rank)
            assert order.step in seats[source.replicated].own, (order, rank)
