"""Hangs of runs of replicas: a slow rank across them, and who asks for inspections.

Causes in single inspections, and of replicas that hang while others train, are in ``conversations/hang``.
"""

import json
import os

from record_conversations import Hang

from ft.faults.hang.causes import over_time
from ft.faults.hang.inspection import DEAD, RUNNING
from ft.job.replicas.launcher import Company
from ft.record import inspections as record
from ft.record.run import replicas


def test_a_rank_that_is_slow_is_told_from_one_that_hangs(tmp_path):
    hang = Hang(tmp_path)

    def moment(step, busy):
        """Three replicas in this step: one rank computes, the other of its replica waits for it, and the others too."""
        for replica in range(3):
            hang.do_replica(replica)
            behind = {f"RING/8/{rank}": step - 1 for rank in range(2)}
            for rank in range(2):
                if replica != busy[0]:
                    hang.do_rank(rank, f"RING/8/{rank}#{step}", step=step)
                elif rank != busy[1]:
                    hang.do_rank(rank, f"DP/3#{step}", counts=behind, step=step)
                else:
                    hang.do_rank(rank, stands=["a.py:7 stall"], counts={**behind, "DP/3": step - 1}, step=step)
        return hang.combined()

    slow = over_time([moment(step, (1, 1) if step % 4 else (0, 0)) for step in range(1, 13)])
    assert [(cause.rank, cause.kind) for cause in slow.causes] == [(3, "slow-rank")] and slow.moving == (0, 1, 2)
    assert over_time([moment(1, (1, 1)), moment(2, (1, 1))]).causes == (), "two inspections tell nothing"
    hangs = over_time([moment(1, (1, 1)), moment(1, (1, 1))])
    assert [(cause.rank, cause.kind) for cause in hangs.causes] == [(3, "busy")] and hangs.moving == ()


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
