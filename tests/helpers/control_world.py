"""Hand-written histories for the control plane: reports of agents and workers, and the orders that answer them."""

import json
from dataclasses import replace

from ft.job import messages as m
from ft.job.control.channel import Posted
from ft.job.control.controller import decide, next_deadline
from ft.job.control.state import ControlOptions, ControlState
from ft.job.control.timeouts import Timeouts
from ft.job.parts import GroupReport, HangCause, Holdings
from ft.net.codec import from_json, to_json

LIMITS = Timeouts()


class World:
    """A run in which the test plays the agents and workers.

    Logical ranks 2k and 2k+1 are data-parallel peers that hold each other's copies. With ``dp=False`` there are no
    peers, and rank r's copy is at r+1. Each node has ``devices`` devices (0: workers need none). Decisions on reports
    are made on a state that was serialized to JSON and back.
    """

    def __init__(self, world_size=4, nodes=1, standbys=1, standby_nodes=0, dp=True, devices=0, **options):
        self.options = ControlOptions(nodes=nodes + standby_nodes, world_size=world_size, **options)
        self.state = ControlState.begin(self.options)
        self.now, self.calls = 100.0, 0
        self.journal = None
        self.nodes, self.dp, self.devices = nodes, dp, devices
        self.seats_per_node = world_size // nodes
        self.standbys_of = {f"n{i}": standbys for i in range(nodes)}
        self.standbys_of |= {f"n{nodes + i}": self.seats_per_node for i in range(standby_nodes)}
        self.decisions, self.orders = [], []
        self.started = dict.fromkeys(self.standbys_of, 0)
        self.node_of: dict[str, str] = {}

    # --- calls -------------------------------------------------------------------------------------------------------

    def say(self, *reports):
        """Pass the reports to the control plane, one after the other; return the orders that they lead to."""
        made = []
        for report in reports:
            made += self._decide(report)
        return made

    def wait(self, seconds, beats=True):
        """Let ``seconds`` pass as the control plane does, with beats of all agents (or of those named); return the
        orders."""
        made, end = [], self.now + seconds
        while self.now < end:
            self.now = min(end, next_deadline(self.state, self.now))
            for node, agent in self.state.agents.items():
                if beats is True or (beats and node in beats):
                    self._decide(m.AgentBeat(node, dict(agent.beats)))
            made += self._decide(None)
        return made

    def _decide(self, report):
        is_news = report is not None and not isinstance(report, m.AgentBeat)
        self.calls += 1
        if is_news:
            self.state = from_json(ControlState, json.loads(json.dumps(to_json(self.state))))
        before = to_json(self.state) if self.calls % 20 == 0 else None
        decisions = decide(self.state, self.now, report)
        if report is None and not decisions and before:
            assert to_json(self.state) == before, "time passed, nothing was decided, and yet the state changed"
        for decision in decisions:
            assert decision.reason
        self.decisions += decisions
        if self.journal is not None:
            posted = Posted(getattr(report, "node", ""), 0, report) if report is not None else None
            self.journal.enter(self.now, self.now, posted, decisions)
        made = [order for decision in decisions for order in decision.orders]
        self.orders += made
        return made

    # --- what was decided --------------------------------------------------------------------------------------------

    @property
    def reasons(self):
        return "\n".join(decision.reason for decision in self.decisions)

    @property
    def last(self):
        """Return the reasons of the last decision."""
        return self.decisions[-1].reason

    def events(self, name):
        return [note.values for decision in self.decisions for note in decision.events if note.name == name]

    def worker(self, rank):
        return self.state.seats[rank]

    def holder(self, rank):
        """Return the worker that holds a logical rank; None if the last reports have emptied the seat."""
        return self.state.workers.get(self.state.seats.get(rank, ""))

    # --- parts of histories ------------------------------------------------------------------------------------------

    def join(self):
        for i, (node, standbys) in enumerate(self.standbys_of.items()):
            seats = self.seats_per_node if i < self.nodes else 0
            self.say(m.AgentJoined(node, i, f"host{i}", seats, standbys, devices=self.devices))
        return self

    def start_workers(self, ranks=None, ready=True):
        """Start the workers of a fresh run. ``ranks``: node -> logical ranks."""
        per = self.seats_per_node
        ranks = ranks or {f"n{i}": list(range(i * per, (i + 1) * per)) for i in range(self.nodes)}
        made = []
        for node, here in ranks.items():
            for rank in here:
                name = self.start_worker(node, rank)
                if ready:
                    made += self.ready(name)
        return made

    def start_worker(self, node, rank=None):
        number = self.started.get(node, 0)
        name, self.started[node] = f"{node}.w{number}", number + 1
        self.node_of[name] = node
        # an agent gives its first workers its devices in order
        alike = [w for w in self.state.workers.values() if w.node == node and w.started_for is not None]
        local_rank = len(alike) if rank is not None else 0
        self.say(m.WorkerStarted(name, node, 1000 + len(self.node_of), rank, local_rank=local_rank))
        return name

    def ready(self, name):
        return self.say(m.WorkerReady(name, self.node_of[name], f"{name}:1"))

    def start_spawned(self, orders):
        """Execute ``Spawn`` orders; return the new standbys."""
        names = []
        for order in orders:
            if isinstance(order, m.Spawn):
                names += [self.start_worker(order.node) for _ in range(order.count)]
        return names

    def run(self, step=5):
        """Start a run and bring it to training, with the standbys ready."""
        self.join()
        self.begin(self.start_workers(), step)
        return self

    def begin(self, orders, step=5):
        """Bring the fresh epoch that ``orders`` have opened to training, with the standbys ready."""
        epoch = opened(orders).epoch
        for rank in sorted(self.state.seats):
            peers = self.peers(rank)
            detail = {"dp_peers": {str(rank): peers}, "shards": {str(rank): [f"optimizer {rank}"]}}
            self.say(m.Observed("layout", detail))
        made = []
        for rank in sorted(self.state.seats):
            made += self.say(m.WorkerResumed(self.worker(rank), epoch, 0))
        for name in self.start_spawned(made):
            self.ready(name)
        self.beat(step)

    def peers(self, rank):
        return [rank, rank ^ 1] if self.dp and len(self.state.seats) % 2 == 0 else [rank]

    def beat(self, step=5, **changes):
        """Let all agents beat. ``changes``: r<rank>=Beat fields of one worker, ``all`` for every worker."""
        for node in self.standbys_of:
            here = {}
            for rank, name in self.state.seats.items():
                if self.node_of[name] == node:
                    beat = m.Beat(0.0, self.state.epoch, step, "compute", 0.05, f"step {step + 1}", 0.1, 0)
                    here[name] = replace(beat, **{**changes.get("all", {}), **changes.get(f"r{rank}", {})})
            self.say(m.AgentBeat(node, here))

    def inspected(self, *causes, waiting=()):
        """Say what the last inspection shows: (ranks, kind) of each cause, and who waits; return the orders that
        follow."""
        causes = [HangCause(list(ranks), kind, f"{kind}, as the inspection shows") for ranks, kind in causes]
        return self.say(m.HangJudged(self.state.inspections, causes, list(waiting))) + self.wait(0.3)

    def exit(self, name, code=-9, attached=True):
        return self.say(m.WorkerExited(name, self.node_of[name], code, attached))

    def kill(self, rank, code=-9):
        return self.exit(self.worker(rank), code)

    def fail(self, rank, *kinds, message="it broke", step=5, epoch=None):
        epoch = self.state.epoch if epoch is None else epoch
        return self.say(m.WorkerFailed(self.worker(rank), epoch, step, [*kinds, "Exception"], message))

    def holdings(self, rank, step=5):
        """Return what the worker of ``rank`` holds by default: its own snapshot, and a copy of its neighbour's."""
        world = self.options.world_size
        other = rank ^ 1 if self.dp else (rank - 1) % world
        return Holdings([step], {other: [step]})

    def release(self, *ranks, epoch=None, step=5, holdings=None):
        """Let survivors among ``ranks`` (default: all that have not yet) leave the closed epoch."""
        made = []
        for rank in ranks or sorted(self.state.seats):
            worker = self.holder(rank)
            if worker is None or (worker.leaving_epoch < 0 and epoch is None and not ranks):
                continue
            held = Holdings() if worker.empty else (holdings or {}).get(rank, self.holdings(rank, step))
            left = worker.leaving_epoch if epoch is None else epoch
            made += self.say(m.WorkerReleased(worker.name, left, step, groups(self, rank), held))
        return made

    def arrive(self, *ranks):
        made = []
        for rank in ranks or sorted(self.state.seats):
            worker = self.holder(rank)
            if worker is not None and worker.empty:
                made += self.say(m.WorkerArrived(worker.name, self.state.epoch, groups(self, rank)))
        return made

    def repair(self, *ranks, **changes):
        order = self.state.repair
        made = []
        for rank in ranks or sorted(self.state.seats):
            if self.holder(rank) is None:
                continue
            beside, source = order.rebuilt.get(rank), order.sources.get(rank)
            if beside is not None:
                how = f"rebuilt:{'+'.join(map(str, beside.there))}"
            else:
                how = "own" if source.owned == rank else f"copy:{source.owned}"
            said = m.WorkerRepaired(
                *(self.worker(rank), order.epoch, rank, order.step, "topology", [f"optimizer {rank}"]),
                *(1, 1, 0, {"owned": how, "replicated": how}, 0.01, 0.02),
            )
            made += self.say(replace(said, **changes.get(f"r{rank}", {})))
        return made

    def resume(self):
        made = []
        for rank in sorted(self.state.seats):
            if self.holder(rank) is not None:
                made += self.say(m.WorkerResumed(self.worker(rank), self.state.epoch, self.state.step))
        return made

    def recover(self, step=5):
        """Play all workers from an opened epoch to training; return the orders."""
        made = self.release(step=step) + self.arrive() + self.repair() + self.resume()
        for name in self.start_spawned(made):
            self.ready(name)
        return made


def groups(world, rank):
    """Return two groups: all ranks, and the pair of data-parallel peers."""
    everyone = sorted(world.state.seats)
    pair = sorted({rank, rank ^ 1})
    return [
        GroupReport("world", everyone, True, False, 7),
        GroupReport(f"pair{pair[0]}", pair, True, False, 7),
    ]


def kinds(orders):
    return [type(order).__name__ for order in orders]


def only(orders, kind):
    """Return the only order of a kind."""
    found = [order for order in orders if isinstance(order, kind)]
    assert len(found) == 1, f"{kind.__name__} in {kinds(orders)}"
    return found[0]


def opened(orders):
    return only(orders, m.Open)
