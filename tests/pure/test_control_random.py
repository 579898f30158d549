"""Random histories: whatever is said, the control plane neither fails, nor keeps two epochs open, nor gets stuck."""

import json
import random

import pytest
from control_world import LIMITS, World

from ft.job import messages as m
from ft.job.control.state import CLOSED, ENDED, OPENED, REPAIRING, RUNNING
from ft.job.parts import Holdings

STEPS = 150


class Chaos:
    """Random reports on a running world, most of them sensible, some stale, doubled or made up."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        nodes = self.random.choice([1, 2])
        self.world = World(4, nodes, standbys=self.random.choice([0, 1, 2]), max_restarts=3).run()
        self.said = []

    def turn(self):
        world, chance = self.world, self.random.random()
        if chance < 0.12:
            world.wait(self.random.choice([0.1, 1.0, 30.0, 130.0]), beats=self.random.choice([True, True, ["n0"]]))
        elif chance < 0.45:
            self.cooperate()
        elif chance < 0.55 and self.said:
            self.say(self.random.choice(self.said))
        else:
            self.say(self.anything())

    def say(self, report):
        self.said.append(report)
        made = self.world.say(report)
        self.obey(made)

    def obey(self, orders):
        for name in self.world.start_spawned(orders):
            if self.random.random() < 0.8:
                self.obey(self.world.ready(name))
        for order in orders:
            if isinstance(order, m.Restart):
                self.obey(self.world.start_workers(order.ranks))

    def cooperate(self):
        """The next thing that a healthy run would say."""
        world = self.world
        for name, worker in list(world.state.workers.items()):
            if not worker.ready:
                self.obey(world.ready(name))
                return
        if world.state.phase in (OPENED, CLOSED):
            self.obey(world.release() + world.arrive())
        elif world.state.phase == REPAIRING:
            self.obey(world.repair())
        elif world.state.seats:
            self.obey(world.resume())

    def anything(self):
        world, pick = self.world, self.random.choice
        worker = pick([*world.node_of, "n7.w7"])
        node = world.node_of.get(worker, "n7")
        epoch = max(0, world.state.epoch - pick([0, 0, 0, 1, 2]))
        kinds = pick(["RecoverableError", "ReplaceNodeError", "FallbackError", "ConnectionError"])
        return pick(
            [
                m.WorkerExited(worker, node, pick([-9, -11, -9, 0]), True),
                m.WorkerSilent(worker, node, 1.5, pick("TDR")),
                m.WorkerFailed(worker, epoch, 5, [kinds, "Exception"], "at random"),
                m.WorkerSuspects(worker, epoch, "world", "Connection closed"),
                m.WorkerReleased(worker, epoch, 5, [], Holdings([5], {r: [5] for r in range(4)})),
                m.WorkerArrived(worker, epoch, []),
                m.WorkerRepaired(worker, epoch, pick(range(4)), 5, "t", [], 1, 1, 0, {"owned": "own"}, 0.0, 0.0),
                m.WorkerResumed(worker, epoch, 5),
                m.WorkerReady(worker, node, "x:1"),
                m.WorkerStarted(worker, node, 1, pick([None, 0, 3])),
                m.AgentJoined(pick(["n0", "n1"]), 0, "h", 2, 1),
                m.AgentBeat(pick(["n0", "n1", "n7"]), {}),
                m.Observed("layout", {"dp_peers": {"0": [0, 1]}, "shards": {}}),
                m.Observed("fault_injected", {"number": 1, "node": "n0", "kind": "kill"}),
            ]
        )


def check_epochs(orders):
    """Epochs are opened one after the other, and none before the one before it is closed or everything restarts."""
    newest, is_open = -1, False
    for order in orders:
        if isinstance(order, m.Open):
            assert not is_open and order.epoch == newest + 1, order
            newest, is_open = order.epoch, True
        elif isinstance(order, m.Close):
            assert is_open and order.epoch == newest, order
            is_open = False
        elif isinstance(order, m.Repair | m.Resume):
            assert is_open and order.epoch == newest, order
        elif isinstance(order, m.Restart):
            is_open = False
        elif isinstance(order, m.Finish | m.Stop):
            assert order is orders[-1], "an order after the end"


@pytest.mark.parametrize("number", range(12))
def test_random_histories(number, seed):
    chaos = Chaos(seed)
    for _ in range(STEPS):
        chaos.turn()
        check_epochs(chaos.world.orders)
        if chaos.world.state.phase == ENDED:
            break
    give_up_or_go_on(chaos)
    check_epochs(chaos.world.orders)


def give_up_or_go_on(chaos):
    """Whatever state it is in, when workers stay silent it comes to an open epoch that trains, a restart or an end."""
    world = chaos.world
    orders = world.orders.copy()
    for _ in range(40):
        if world.state.phase in (RUNNING, ENDED):
            return
        made = world.wait(LIMITS.join_s / 2)
        chaos.obey(made)
        if any(isinstance(order, m.Restart | m.Stop) for order in world.orders[len(orders) :]):
            return
        chaos.cooperate()
    raise AssertionError(f"stuck while {world.state.phase}: {json.dumps(world.reasons.splitlines()[-10:], indent=1)}")
