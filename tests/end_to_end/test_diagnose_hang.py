"""`ft diagnose hang` on real runs: who hangs and where, while the run is under way and after it was recovered."""

import json
import subprocess
import sys
import time

import pytest
from ft_runs import ROOT, Running, flags, ft_run

LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
LIMITS = "stall_s: 2\nsilent_s: 30\ncollective_s: 4\n"


@pytest.fixture
def quick(tmp_path):
    """Return the flag for limits with which hangs are noticed soon."""
    (tmp_path / "limits.yaml").write_text(LIMITS)
    return f"--limits {tmp_path}/limits.yaml"


def diagnose(*arguments) -> tuple[int, dict]:
    done = command(*arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def command(*arguments) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "ft", "diagnose", "hang", *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_who_is_blocked_in_its_own_code_is_named_with_its_line(corpus, quick, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 12), options=f"{quick} --inject stall@step=6:rank=1")
    assert done.code == 0 and done.named("looked"), done.explain()
    code, found = diagnose(tmp_path / "run")
    assert code == 1, found
    first = found["causes"][0]
    assert (first["rank"], first["kind"]) == (1, "busy"), found
    assert "ft/faults/acts.py" in first["where"], found
    assert {edge["rank"] for edge in found["waiting"]} == {0, 2, 3}, found
    assert len(found["causes"]) == 1, found
    said = command(tmp_path / "run", "--picture", tmp_path / "hang.png")
    assert said.stdout.startswith("look at 4 ranks") and (tmp_path / "hang.png").stat().st_size > 0, said
    assert [event.rank for event in done.named("fault_detected")] == [1], "an innocent rank was replaced"


def test_a_stopped_process_is_named(corpus, tmp_path):
    done = ft_run(tmp_path / "run", flags(corpus, LAYOUT, 12), options="--inject hang@step=6:rank=2")
    assert done.code == 0, done.explain()
    code, found = diagnose(tmp_path / "run")
    assert code == 1 and [(one["rank"], one["kind"]) for one in found["causes"]] == [(2, "stopped")], found


def test_a_run_under_way_is_asked_while_it_hangs(corpus, tmp_path):
    run = Running(
        tmp_path / "run", "pretrain_gpt.py", flags(corpus, LAYOUT, 60), options="--inject stall@step=6:rank=3"
    )
    try:
        run.wait_for(lambda: run.step() >= 5)
        time.sleep(1)  # the others are in the operation in which they wait
        code, found = diagnose(tmp_path / "run")
    finally:
        run.stop()
    assert code == 1 and [(one["rank"], one["kind"]) for one in found["causes"]] == [(3, "busy")], found


def test_a_healthy_run_has_no_cause_that_lasts(corpus, tmp_path):
    run = Running(tmp_path / "run", "pretrain_gpt.py", flags(corpus, LAYOUT, 200))
    try:
        run.wait_for(lambda: run.step() >= 3)
        looks = [diagnose(tmp_path / "run")[1] for _ in range(2)]
    finally:
        run.stop()
    assert all(one["wall"] for one in looks) and looks[0]["wall"] < looks[1]["wall"], looks
    assert not {"stopped", "dead", "mismatch", "missing-call", "cycle"} & {
        c["kind"] for one in looks for c in one["causes"]
    }


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "replica-0").mkdir()
    done = command(tmp_path)
    assert done.returncode == 2 and "a run of 1 replicas" in done.stderr, done.stderr
    done = command(tmp_path / "replica-0")
    assert done.returncode == 2 and "contains no look" in done.stderr, done.stderr
