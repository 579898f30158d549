"""`ft diagnose hang` on real runs: who hangs and where, while the run is under way and after it was recovered."""

import json
import os
import signal
from subprocess import CompletedProcess

import replica_runs
from agent_jobs import ft
from ft_runs import Running, flags, ft_run
from replica_runs import Replicas
from waiting import eventually

from ft.base import events
from ft.record import inspections

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
LATE = "{stall_s: 60, silent_s: 70, collective_s: 80, exit_s: 100, verdict_s: 100, drain_s: 100, repair_s: 110}"
"""Limits with which nobody is replaced while a test looks."""


def diagnose(*arguments) -> tuple[int, dict]:
    done = command(*arguments, "--json")
    assert done.returncode in (0, 1), done.stdout
    return done.returncode, json.loads(done.stdout)


def diagnoses(folder) -> dict[int, dict]:
    """Return what each stored inspection has found; on a busy machine there are more than those of the faults."""
    return {number: diagnose(folder, "--inspection", number)[1] for number in inspections.stored(folder)}


def blamed(found: dict) -> list[tuple]:
    return [(one["rank"], one["kind"]) for one in found["causes"]]


def command(*arguments) -> CompletedProcess:
    return ft("diagnose", "hang", *arguments)


def test_who_is_blocked_in_its_own_code_is_named_with_its_line_and_then_a_stopped_process(corpus, quick, tmp_path):
    options = f"{quick} --inject stall@step=6:rank=1,hang@step=12:rank=2"
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 18), options=options)
    assert done.code == 0 and done.named("inspected"), done.explain()
    stored = diagnoses(tmp_path / "run")
    assert any(blamed(found) == [(2, "stopped")] for found in stored.values()), stored
    number = next((number for number, found in stored.items() if blamed(found) == [(1, "busy")]), None)
    assert number is not None, stored
    assert "ft/faults/worker.py" in stored[number]["causes"][0]["where"], stored
    assert {rank for wait in stored[number]["waiting"] for rank in wait["ranks"]} == {0, 2, 3}, stored
    said = command(tmp_path / "run", "--inspection", number, "--picture", tmp_path / "hang.png")
    assert said.returncode == 1, said
    assert said.stdout.startswith("inspection of 4 ranks") and (tmp_path / "hang.png").stat().st_size > 0, said
    assert [event.rank for event in done.named("fault_detected")] == [1, 2], "an innocent rank was replaced"
    assert "cause     busy: rank 1" in done.output, done.output
    assert any(f"ft diagnose hang {tmp_path}/run --inspection {number}" in done.output for number in stored), (
        done.output
    )


def test_who_holds_the_interpreter_lock_is_named_with_its_line(corpus, tmp_path):
    (tmp_path / "limits.yaml").write_text(LATE)
    options = f"--limits {tmp_path}/limits.yaml --inject gil@step=6:rank=3:for=90s"
    run = Running(tmp_path / "run", "pretrain_gpt.py", flags(corpus, LAYOUT, 60), options=options)
    try:
        run.wait_for(lambda: run.step() >= 5)
        code, found = eventually(lambda: blamed((seen := diagnose(run.folder))[1]) == [(3, "busy")] and seen)
    finally:
        run.stop()
    assert code == 1, found
    assert "hold_the_interpreter" in found["causes"][0]["where"], found
    assert any("holds the lock" in sentence for sentence in found["causes"][0]["evidence"]), found


def test_a_healthy_run_has_no_cause_that_lasts(corpus, tmp_path):
    run = Running(tmp_path / "run", "pretrain_gpt.py", flags(corpus, LAYOUT, 4000))
    try:
        run.wait_for(lambda: run.step() >= 3)
        found = [diagnose(tmp_path / "run")[1] for _ in range(2)]
    finally:
        run.stop()
    assert all(one["wall"] for one in found) and found[0]["wall"] < found[1]["wall"], found
    kinds = {cause["kind"] for one in found for cause in one["causes"]}
    assert not {"stopped", "dead", "mismatch", "missing-call", "cycle"} & kinds, found


SHARDED = "--use-distributed-optimizer"


def named(found) -> list[tuple]:
    return [(one["replica"], one["rank"], one["kind"]) for one in found["causes"]]


def waits(found) -> set[tuple]:
    """Return (replica, rank, first word of the group, replica, rank) of all waits."""
    return {
        (one["replica"], one["rank"], wait["group"].split("/")[0], other["replica"], other["rank"])
        for wait in found["waiting"]
        for one in wait["ranks"]
        for other in wait["on"]
    }


def test_of_all_replicas_the_rank_is_named_for_which_the_others_wait_in_their_rings(corpus, tmp_path):
    # In the first step nobody gives up soon, because it may take long on any replica.
    options = "--inject stall@replica=1:step=1:rank=1:phase=forward"
    run = Replicas(tmp_path / "run", replica_runs.flags(corpus, SHARDED, 60), replicas=3, nproc=6, options=options)
    try:
        log = run.folder / "replica-1" / "events.jsonl"
        run.wait_for(lambda: any(event.name == events.FAULT_INJECTED for event in events.read(log)))
        code, found = eventually(lambda: len(waits((seen := diagnose(run.folder))[1])) == 5 and seen)
        said = command(run.folder, "--picture", tmp_path / "hang.png").stdout
        alone = diagnose(run.folder / "replica-2")
        own = diagnose(run.folder / "replica-1")
    finally:
        run.stop()
    assert code == 1 and named(found) == [(1, 1, "busy")], found
    assert "ft/faults/worker.py" in found["causes"][0]["where"], found
    ring = {(r, k, "RING", 1, k) for r in (0, 2) for k in (0, 1)}
    assert waits(found) == ring | {(1, 0, "replica 1", 1, 1)}, found
    assert len(found["causes"][0]["delayed"]) == 5 and found["moving"] == [], found
    assert "cause 1: busy: replica 1 rank 1 (n0.w1 on n0)" in said and (tmp_path / "hang.png").stat().st_size, said
    assert alone[0] == 0 and not alone[1]["causes"], f"an innocent rank of replica 2 is named: {alone}"
    assert {other for _, _, _, other, _ in waits(alone[1])} == {0, 1}, alone
    assert own[0] == 1 and named(own[1]) == [(1, 1, "busy")], own


def test_a_replica_that_hangs_makes_an_inspection_and_the_others_are_asked_for_one(corpus, quick, tmp_path):
    slowly = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    options = f"{quick} --inject {slowly} --inject stall@replica=1:step=5:rank=1"
    done = replica_runs.train(
        tmp_path / "run", replica_runs.flags(corpus, SHARDED, 60, batch=8), replicas=2, nproc=4, options=options
    )
    assert done.code == 0, done.explain()
    stalls = [found for found in diagnoses(tmp_path / "run").values() if named(found) == [(1, 1, "busy")]]
    assert stalls and stalls[0]["why"].startswith("replica 1: "), stalls
    assert not any(1 in found["moving"] for found in stalls), stalls
    report = ft("report", tmp_path / "run")
    assert report.returncode == 0, report
    assert "busy: replica 1 rank 1" in (tmp_path / "run" / "report.html").read_text()


def test_a_stopped_quorum_server_is_named_and_a_run_that_goes_on_has_no_cause(corpus, tmp_path):
    run = Replicas(tmp_path / "run", replica_runs.flags(corpus, SHARDED, 4000), replicas=3, nproc=3)
    try:
        run.wait_for(lambda: run.step() >= 3)
        eventually(lambda: (seen := diagnose(run.folder))[0] == 0 and seen[1]["moving"] == [0, 1, 2])
        os.kill(run.server(), signal.SIGSTOP)
        code, found = eventually(lambda: len(waits((seen := diagnose(run.folder))[1])) == 3 and seen)
        os.kill(run.server(), signal.SIGCONT)
    finally:
        run.stop()
    assert code == 1 and named(found) == [(None, None, "stopped")], found
    assert waits(found) == {(replica, 0, "QUORUM", None, None) for replica in range(3)}, found
