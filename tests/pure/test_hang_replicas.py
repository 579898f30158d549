"""Hangs of runs of replicas: inspections of several replicas are one, and the rank at fault is found across them."""

import json
import os

from ft.faults.hang.causes import over_time
from ft.faults.hang.inspection import (
    DEAD,
    RUNNING,
    SEND,
    STOPPED,
    Across,
    Inspection,
    Operation,
    Rank,
    ReplicaRank,
    Thread,
    channel,
)
from ft.faults.hang.replicas import combine
from ft.job.control.inspections import judge
from ft.job.replicas.launcher import Company
from ft.observe.diagnose.hang import as_text
from ft.record import inspections as record
from ft.record.run import replicas

DP, AGREEMENT = "DP/3", "AGREEMENT/9"
BLOCKED = (Thread("MainThread", ("ft/faults/worker.py:76 stall",), True, "S"),)
LAST = 8
"""Number of the last quorum."""


def said(rank, *operations, counts=None, **more):
    counted = {one.channel: one.sequence for one in operations if one.peer is None} | (counts or {})
    return Rank(rank, f"n0.w{rank}", "n0", counts=counted, operations=operations, **more)


def dp(sequence=5, **more):
    return Operation(DP, "all_reduce", sequence, **more)


def ring(rank, sequence=3, **more):
    return Operation(f"RING/{LAST}/{rank}", "all_reduce", sequence, **more)


def replica(*ranks, waits=(), members=(0, 1, 2), why="asked for"):
    """An inspection of a replica of two ranks; the server says that it waits for the replicas ``waits``."""
    across = {f"RING/{LAST}/{rank}": Across(tuple(members), rank) for rank in range(2)}
    across["QUORUM"] = Across(tuple(waits), 0)
    for rank in range(2):
        across[f"CONNECT/{LAST}/{rank}"] = Across(tuple(members), rank)
    for one in ranks:
        for operation in one.operations:
            across |= {operation.group: Across((), one.rank)} if operation.group.startswith(("STATE", "FETCH")) else {}
    return Inspection({one.rank: one for one in ranks}, {DP: (0, 1), AGREEMENT: (0, 1)}, 100.0, why, across)


def in_the_ring(number=3):
    """A replica that has all its gradients and waits for the same ranks of the others."""
    return replica(said(0, ring(0, number)), said(1, ring(1, number)))


def test_ranks_are_numbered_through_and_names_of_groups_inside_a_replica_are_told_apart():
    send = Operation(DP, SEND, 2, peer=1)
    inspection = combine({0: in_the_ring(), 2: replica(said(0, send, counts={channel(DP, SEND, 1): 2}), said(1))})
    assert inspection.places[5] == ReplicaRank(2, 1) and set(inspection.ranks) == {0, 1, 4, 5}
    assert inspection.groups["replica 2/DP/3"] == (4, 5) and inspection.groups[f"RING/{LAST}/1"] == (1, 3, 5)
    assert inspection.ranks[4].operations[0].peer == 5 and inspection.ranks[4].counts == {"replica 2/DP/3>5": 2}
    assert inspection.unasked == {1}, "it is mentioned, and has no inspection"


def test_the_control_plane_of_a_replica_hears_of_its_own_ranks_only():
    stuck = replica(said(0, dp(), counts={f"RING/{LAST}/0": 2}), said(1, threads=BLOCKED, counts={DP: 4}))
    own = judge(4, combine({1: stuck}, home=1))
    assert [(one.ranks, one.kind) for one in own.causes] == [([1], "busy")] and own.waiting == [0]
    elsewhere = judge(5, combine({1: in_the_ring()}, home=1))
    assert (elsewhere.causes, elsewhere.waiting) == ([], [0, 1]), "they wait for other replicas"


def moment(step, busy):
    """An inspection of three replicas in this step: one rank computes, the other of its replica waits for it there."""
    inspections = {}
    for number in range(3):
        waits = [ring(0, step), ring(1, step)] if number != busy[0] else [dp(step), dp(step)]
        counts = {f"RING/{LAST}/{rank}": step - 1 for rank in range(2)}
        here = [said(rank, waits[rank], counts={} if number != busy[0] else counts, step=step) for rank in range(2)]
        if number == busy[0]:
            here[busy[1]] = said(busy[1], counts={**counts, DP: step - 1}, step=step, threads=BLOCKED)
        inspections[number] = replica(*here)
    return combine(inspections)


def test_a_rank_that_is_slow_is_told_from_one_that_hangs():
    slow = over_time([moment(step, (1, 1) if step % 4 else (0, 0)) for step in range(1, 13)])
    assert [(cause.rank, cause.kind) for cause in slow.causes] == [(3, "slow-rank")] and slow.moving == (0, 1, 2)
    assert over_time([moment(1, (1, 1)), moment(2, (1, 1))]).causes == (), "two inspections tell nothing"
    hangs = over_time([moment(1, (1, 1)), moment(1, (1, 1))])
    assert [(cause.rank, cause.kind) for cause in hangs.causes] == [(3, "busy")] and hangs.moving == ()


def test_a_replica_that_hangs_is_found_while_the_others_train_on():
    def both(step):
        stuck = said(0, dp(age_s=4.0)), said(1, threads=BLOCKED, counts={DP: 4})
        moving = said(0, ring(0, step, age_s=0.01), step=step), said(1, counts={f"RING/{LAST}/1": step - 1}, step=step)
        whys = "replica 1: a stall", "a stall"
        others = {number: replica(*moving, why=whys[0]) for number in (0, 2)}
        return combine({**others, 1: replica(*stuck, why=whys[1])})

    assert both(5).takers == {1} and both(5).why == "replica 1: a stall"
    for inspections in ([both(5), both(6)], [both(5)]):
        found = over_time(inspections)
        assert [(cause.rank, cause.kind) for cause in found.causes] == [(3, "busy")], found
        assert found.moving == (0, 2)
    assert "replicas 0, 2 train on" in as_text(both(6), found)


def test_a_replica_does_not_hang_that_has_started_something_within_the_time_of_a_step():
    def asked(age_s):
        late = said(0, counts={DP: 4}), said(1, dp(age_s=age_s), step_s=8.0)
        return over_time([combine({0: replica(*late), 1: in_the_ring()})] * 2)

    assert asked(3.0).causes == () and asked(3.0).moving == (0,)
    assert [(cause.rank, cause.kind) for cause in asked(9.0).causes] == [(0, "busy")]


def test_a_stopped_process_is_named_even_if_its_replica_has_just_moved():
    def inspection(number):
        return combine({0: replica(said(0, dp(number)), said(1, process=STOPPED, answers=False)), 1: in_the_ring(3)})

    found = over_time([inspection(4), inspection(5)])
    assert [(cause.rank, cause.kind) for cause in found.causes] == [(1, "stopped")]


def test_when_one_replica_makes_an_inspection_the_launcher_of_its_first_node_asks_the_others(tmp_path):
    for replica in range(3):
        (tmp_path / f"replica-{replica}").mkdir()

    def wishes():
        files = {replica: record.wanted(folder) for replica, folder in replicas(tmp_path).items()}
        return {replica: file.read_text() for replica, file in files.items() if file.exists()}

    company = Company(tmp_path, lambda: ("n0", os.getpid()))
    company.follow({0: [0, ""], 1: [3, "a stall"]}, leads=[1])
    assert wishes() == {} and not (tmp_path / "inspections").exists(), "nothing has begun"
    company.follow({0: [1, ""], 1: [3, "a stall"]}, leads=[0, 1])
    assert wishes() == {}, "somebody has asked for it, and for the others"
    company.follow({0: [1, ""], 1: [4, "a stall"]}, leads=[0])
    assert wishes() == {}, "the launcher of the first node asks"
    company.follow({0: [1, ""], 1: [5, "a stall"]}, leads=[1])
    assert wishes() == {0: "replica 1: a stall", 2: "replica 1: a stall"}
    (line, *_) = (tmp_path / "inspections" / "server.jsonl").read_text().splitlines()
    assert json.loads(line)["said"]["process"] == RUNNING
    ended = Company(tmp_path, lambda: ("n0", 0))
    ended.follow({0: [0, ""]}, [])
    ended.follow({0: [1, ""]}, [])
    assert (
        json.loads((tmp_path / "inspections" / "server.jsonl").read_text().splitlines()[-1])["said"]["process"] == DEAD
    )
