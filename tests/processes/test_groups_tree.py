"""Collectives over a tree of small groups: right answers, few connections, and an inner rank that dies or stops."""

import os
import signal
import stat
import threading
import time
from concurrent.futures import Future, wait

import pytest
import torch
import torch.distributed as dist
from groups_worker import Worker

from ft.base.errors import EpochClosed
from ft.job.quorum import Quorum, Report
from ft.state.groups.backends import MOST_IN_MESH, connections, neighbours
from ft.state.groups.tree import FAN_OUT, Tree, TreeShape
from ft.systems.hsdp import agreement
from ft.systems.hsdp.agreement import Agreement
from ft.systems.hsdp.protocol import Question
from ft.systems.hsdp.rank import Votes, digest

RELEASE_LIMIT_S = 45.0
OPS = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


@pytest.mark.parametrize("nodes", [1, 2, 5, 32, 33, 34, 1024, 1025])
@pytest.mark.parametrize("fan_out", [1, 2, 32])
def test_a_tree_reaches_every_node_once(nodes, fan_out):
    tree = TreeShape(nodes, fan_out)
    assert [child for node in range(nodes) for child in tree.children(node)] == list(range(1, nodes))
    assert all(node in tree.children(tree.parent(node)) for node in range(1, nodes)) and tree.parent(0) is None
    assert TreeShape(1024).depth == 3 and TreeShape(1).depth == 0 and TreeShape(17).depth == 1


@pytest.mark.parametrize("size", [1, 2, 3, 17, 18, 273, 274, 4096, 98304])
def test_every_rank_has_one_parent_and_few_connections(size):
    shape, connections = TreeShape(size), [0] * size
    for inner in shape.inner():
        members = [inner, *shape.children(inner)]
        assert all(shape.parent(child) == inner for child in members[1:])
        for member in members:
            connections[member] += len(members) - 1
    assert sum(len(shape.children(inner)) for inner in shape.inner()) == size - 1
    assert all(shape.children(place) for place in shape.inner())
    assert max(connections) <= 2 * FAN_OUT
    assert FAN_OUT ** (shape.depth - 1) <= size


def answers(fan_out):
    tree = Tree("test", fan_out)
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    for name, op in OPS.items():
        word = torch.tensor([rank, -rank, (rank * 7) % size], dtype=torch.int64)
        tree.all_reduce(word, op)
        found[name] = word.tolist()
    word = torch.tensor([rank], dtype=torch.int32)
    started = tree.start(word, dist.ReduceOp.MAX)
    started.wait()
    assert started.is_completed() and word.item() == size - 1
    values = torch.full((5,), rank + 3, dtype=torch.uint8)
    tree.broadcast(values)
    found["broadcast"] = values.tolist()
    rows = tree.gather(torch.tensor([rank, 10 * rank], dtype=torch.int64))
    assert (rows is None) == (rank != 0)
    return found, None if rows is None else rows.tolist()


@pytest.mark.parametrize(("size", "fan_out"), [(1, 2), (3, 2), (4, 2), (5, 1), (7, 2), (8, 2)])
def test_a_tree_answers_as_one_group(size, fan_out, ranks):
    every = [list(range(size)), [-rank for rank in range(size)], [rank * 7 % size for rank in range(size)]]
    expected = {name: [pick(row) for row in every] for name, pick in (("min", min), ("max", max), ("sum", sum))}
    expected["broadcast"] = [3] * 5
    for rank, (found, rows) in enumerate(ranks(answers, size, fan_out)):
        assert found == expected
        if rank == 0:
            assert rows == [[rank, 10 * rank] for rank in range(size)]


class Leader:
    """A quorum client that keeps the rows of addresses it is told, and gives each question a quorum of its own, all but
    the first one not before it may."""

    def __init__(self):
        self.asked, self.may_answer = 0, threading.Event()

    def hello(self, rows, steps):
        self.told = rows

    def ask(self, report):
        self.asked += 1
        assert self.asked == 1 or self.may_answer.wait(LIMIT_S)
        future = Future()
        future.set_result(Quorum(self.asked, 20, 6, (0,), (), {0: 1}))
        return future

    def rows(self, replica, life):
        return self.told


def agreed_and_voted():
    rank = dist.get_rank()
    leader = Leader() if rank == 0 else None
    agreement = Agreement(Tree("AGREEMENT", 2), {"ring": f"r{rank}", "fetch": f"f{rank}"})
    agreement.begin(leader)
    agreement.ask(Question(Report(0, 1, 20, 6), False, 60.0), lambda question, agreed: None)
    agreed = agreement.wait()
    agreement.close()
    tree = Tree("VOTES", 2)
    votes = Votes(tree)
    said = [votes.all(True), votes.all(rank != 4), votes.suspects(1 if rank == 3 else None, (7, 8, 9))]
    return agreed.quorum.number, agreed.rows[0], said, digest({"x": torch.full((3,), float(rank))}, tree)


def test_a_replica_agrees_and_votes_over_a_tree(ranks):
    found = ranks(agreed_and_voted, 6)
    rows = [{"ring": f"r{rank}", "fetch": f"f{rank}"} for rank in range(6)]
    assert [one[:3] for one in found] == [(1, rows, [True, False, (8,)])] * 6
    assert len({one[3] for one in found}) == 1


def sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
        except FileNotFoundError:  # the descriptor of the listing
            continue
    return found


def sockets_of_a_tree(address, fan_out):
    worker = Worker(address)
    worker.meet("before")
    before = sockets()
    tree = Tree("test", fan_out)
    tree.all_reduce(torch.ones(1, dtype=torch.int64), dist.ReduceOp.SUM)
    worker.meet("after")
    return sockets() - before


@pytest.mark.parametrize("size", [7, 12])
def test_the_number_of_sockets_does_not_grow_with_the_world(size, ranks, address):
    fan_out, listeners = 2, 2
    assert max(ranks(sockets_of_a_tree, size, address, fan_out, init=False)) <= 2 * fan_out + listeners


# --- an inner rank that is lost ---------------------------------------------------------------------------------------
# Ranks 0 to 6 with two children each: 1 and 2 are below 0, 3 and 4 below 1, 5 and 6 below 2.


def loses_a_relay(address, signum):
    worker = Worker(address)
    tree = Tree("test", 2)
    word = torch.tensor([worker.rank], dtype=torch.int64)
    tree.all_reduce(word, dist.ReduceOp.MAX)
    assert word.item() == 6
    worker.meet("lost")
    if worker.rank == 1:
        os.kill(os.getpid(), signum)
    else:
        started = tree.start(word, dist.ReduceOp.SUM)
        worker.store.set(f"started/{worker.rank}", "")
        with pytest.raises(EpochClosed, match="rank 1 is lost"):
            started.wait()
        late = time.monotonic() - worker.closed_at
    worker.renew(replaced=[1])
    return late, summed(tree, worker)


def takes_its_place(address):
    worker = Worker(address, rank=1, size=7, epoch=1, alone=True)
    tree = Tree("test", 2)
    tree.all_reduce(torch.zeros(1, dtype=torch.int64), dist.ReduceOp.MAX)  # ends although nobody is connected
    worker.epoch = 0
    worker.enter(worker.plan([1]), 1)
    return 0.0, summed(tree, worker)


def summed(tree, worker):
    found = []
    for turn in range(3):
        word = torch.tensor([worker.rank + turn], dtype=torch.int64)
        tree.all_reduce(word, dist.ReduceOp.SUM)
        found.append(word.item())
    return found


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_inner_rank_that_is_lost_holds_nobody_up(signum, ranks, address, control):
    old = ranks.start(loses_a_relay, 7, address, signum, init=False)
    control.wait([f"started/{rank}" for rank in (0, 2, 3, 4, 5, 6)])
    if signum == signal.SIGKILL:
        control.wait(["suspects/0"])  # a rank beside it has seen its connection break
    else:
        time.sleep(0.2)
    control.set("close/0", "rank 1 is lost")
    new = ranks.start(takes_its_place, 1, address, init=False)
    joined = new.wait(timeout=180)[0]
    if signum == signal.SIGSTOP:
        old.kill(1)
    outcomes = [joined, *(one for one in old.wait(timeout=180) if one.rank != 1)]
    assert [one.error for one in outcomes] == [None] * 7
    for late, sums in (one.value for one in outcomes):
        assert late < RELEASE_LIMIT_S
        assert sums == [21, 28, 35]


class SlowTree(Tree):
    """A tree whose rank 1 stops between the message from its children and the one to its parent."""

    delay_s = 0.0

    def _from_children(self, own):
        parts = super()._from_children(own)
        time.sleep(self.delay_s if self.rank == 1 else 0.0)
        return parts


@pytest.mark.on_ranks(7, init=False)
def test_an_operation_of_a_closed_epoch_does_not_go_on_in_the_next(address):
    worker = Worker(address)
    tree = SlowTree("test", 2)
    tree.delay_s = 1.0
    if worker.rank != 6:  # the epoch ends while the relays of all other ranks wait for this one
        tree.start(torch.tensor([1000]), dist.ReduceOp.SUM)
    time.sleep(0.2)
    worker.meet("started")
    if worker.rank == 0:
        worker.close_all()
    worker.leave()
    tree.delay_s = 0.0
    plan = worker.plan()
    worker.enter(plan)
    assert plan.rebuild and summed(tree, worker) == [21, 28, 35]


# --- large groups, whose pairs are not all connected ------------------------------------------------------------------

LARGE, LISTENERS = MOST_IN_MESH + 3, 1


@pytest.mark.parametrize("size", [2, 3, 33, 34, 64, 4096, 98304])
def test_a_member_has_few_neighbours_and_is_a_neighbour_of_theirs(size):
    for rank in (0, 1, size // 2, size - 1):
        near = neighbours(rank, size)
        assert rank not in near and {(rank + 1) % size, (rank - 1) % size} - {rank} <= set(near)
        assert all(rank in neighbours(other, size) for other in near)
    assert connections(size) == (size - 1 if size <= MOST_IN_MESH else len(neighbours(0, size)))
    assert connections(size) <= max(MOST_IN_MESH - 1, 2 * (size - 1).bit_length())


@pytest.mark.on_ranks(LARGE, init=False)
def test_a_large_group_has_few_sockets_before_and_after_its_operations(address):
    worker = Worker(address)
    worker.meet("before")
    before = sockets()
    group = dist.new_group(backend="gloo")
    made = sockets() - before
    for _ in range(2):
        x = torch.ones(1000)
        dist.all_reduce(x, group=group)
        assert x[0] == worker.size
        dist.barrier(group)
        dist.broadcast(x, group=group, group_src=5)
        dist.all_gather([torch.ones(3) for _ in range(worker.size)], torch.ones(3), group=group)
    used = sockets() - before
    worker.meet("after")
    assert made <= used <= connections(LARGE) + LISTENERS < LARGE - 1, (made, used)


# --- the agreement of a replica's ranks, beside their training threads ------------------------------------------------

LIMIT_S = 30.0


@pytest.fixture
def alone(monkeypatch):
    """One rank: what it gives to the group is what comes of it."""
    monkeypatch.setattr(agreement, "_gather", lambda group, row: [row])
    monkeypatch.setattr(agreement, "_broadcast", lambda group, content: content)


def test_the_answer_to_a_question_is_never_that_to_the_one_before(alone, aside):
    leader = Leader()
    both = Agreement(None, {})
    both.begin(leader)
    question = Question(Report(0, 1, 20, 6), False, 60.0)

    def then(_, agreed):  # what waits for the first quorum goes on with its step, and has failed it already
        if agreed.quorum.number == 1:
            both.ask(question, then)

    both.ask(question, then)
    while leader.asked < 2:
        threading.Event().wait(0.001)
    waiting = aside(both.wait)
    assert not wait([waiting], 0.1).done
    leader.may_answer.set()
    assert waiting.result(LIMIT_S).quorum.number == 2
    both.close()
