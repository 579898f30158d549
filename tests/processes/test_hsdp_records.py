"""What replicas put on record: loader_state, commits.jsonl, and the learning rate of a step."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from ft.base.errors import UserError
from ft.systems.hsdp import commits, loader_state
from ft.systems.hsdp.commits import Commit, CommitLog, Records
from ft.systems.hsdp.layer import initial_assignment
from ft.systems.hsdp.loader_state import LoaderState
from ft.systems.hsdp.place import DEFAULT, MODES, ReplicaContext
from ft.systems.hsdp.samples import Past, SampleAssignment
from ft.systems.hsdp.work import Work, factor, scaled

ASSIGNMENT = SampleAssignment(3, 2, (Past(2, 4, (8, 4), 2),))
STATE = LoaderState(7, 9, 4, ASSIGNMENT, {0: 20, 1: 16, 2: 20})
COMMIT = Commit(7, 9, 8, (0, 2), (1,), 4, ASSIGNMENT, STATE.positions, 1e9, 0.5, 0.25, 3.5, 4096, 16)


def test_the_state_comes_back(tmp_path):
    assert loader_state.read(tmp_path) is None
    assert loader_state.write(tmp_path, STATE) == ""
    assert loader_state.read(tmp_path) == STATE
    written = json.loads((tmp_path / "loader_state").read_text())
    assert written["state"]["assignment"]["replicas"] == 3
    assert written["state"]["positions"] == {"0": 20, "1": 16, "2": 20}


def test_a_newer_state_is_never_overwritten_by_an_older_one(tmp_path):
    loader_state.write(tmp_path, STATE)
    assert "step 7 of quorum 9 is there already" in loader_state.write(tmp_path, replace(STATE, step=9, quorum=8))
    assert loader_state.read(tmp_path) == STATE
    # Gone back to a checkpoint: the step is an older one, the quorum is not.
    back = replace(STATE, step=3, quorum=10)
    assert loader_state.write(tmp_path, back) == ""
    assert loader_state.read(tmp_path) == back


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "torn"),
        (b'{"format": "megatron-ft loader_state 2", "st', "torn"),
        (b"\x00" * 300, "torn"),
        (b'{"step": 4}', "its format is not"),
        (b"[1, 2]", "its format is not"),
    ],
)
def test_a_torn_or_foreign_file_is_refused_by_name_and_replaced_by_the_next_commit(content, why, tmp_path):
    path = tmp_path / "loader_state"
    path.write_bytes(content)
    with pytest.raises(UserError, match=why) as refused:
        loader_state.read(tmp_path)
    assert str(path) in refused.value.problem
    assert loader_state.write(tmp_path, STATE) == ""
    assert loader_state.read(tmp_path) == STATE


@pytest.mark.parametrize("seed", range(30))
def test_no_damage_passes_for_a_state(seed, tmp_path):
    loader_state.write(tmp_path, STATE)
    path, rng = tmp_path / "loader_state", random.Random(seed)
    content = bytearray(path.read_bytes().strip())
    at = rng.randrange(len(content))
    content[at] ^= 1 << rng.randrange(7)
    path.write_bytes(content[: rng.choice([len(content), at])])
    try:
        found = loader_state.read(tmp_path)
    except UserError:
        return
    assert found == STATE, f"seed {seed}"


def test_a_folder_that_cannot_be_written_is_told_and_not_raised(tmp_path):
    assert "No such file" in loader_state.write(tmp_path / "gone", STATE)


def test_a_frozen_replica_keeps_nobody_waiting(tmp_path):
    """One that is stopped inside a write; when it is dead the others write again."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent.parent)!r})
from pathlib import Path
from ft.systems.hsdp import loader_state
with loader_state._alone(Path({str(tmp_path)!r}) / ".loader_state.lock") as alone:
    print(alone, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    frozen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert frozen.stdout.readline() == "True\n"
        assert loader_state.write(tmp_path, STATE) == "another replica is writing"
    finally:
        frozen.kill()
        frozen.communicate(timeout=180)
    assert loader_state.write(tmp_path, STATE) == ""


def test_the_newest_stays_when_replicas_write_at_once_and_are_killed(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent.parent)!r})
from dataclasses import replace
from pathlib import Path
from ft.systems.hsdp import loader_state
from ft.systems.hsdp.samples import SampleAssignment
state = loader_state.LoaderState(0, 0, 1, SampleAssignment(1, 1), {{0: 0}})
first = int(sys.argv[1])
for quorum in range(first, 10_000, 3):
    if not loader_state.write(Path({str(tmp_path)!r}), replace(state, step=quorum, quorum=quorum)):
        print(quorum, flush=True)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(i)], stdout=subprocess.PIPE) for i in range(3)]
    newest, deadline = -1, time.monotonic() + 120
    try:
        while time.monotonic() < deadline and newest < 300:
            found = loader_state.read(tmp_path)
            age = -1 if found is None else found.quorum
            assert age >= newest
            newest = age
        os.kill(writers[0].pid, signal.SIGKILL)
    finally:
        for writer in writers:
            writer.kill()
        said = b"".join(writer.communicate(timeout=180)[0] for writer in writers)
    assert newest >= 300
    assert loader_state.read(tmp_path).quorum >= max(map(int, said.split()))


def test_commits_come_back_and_torn_lines_are_left_out(tmp_path):
    log = CommitLog(tmp_path)
    bare = structs.replace(COMMIT, step=8, loss=None, tokens=None, at=None)
    for commit in (COMMIT, bare, structs.replace(COMMIT, loss=float("nan"))):
        log.write(commit)
    log.close()
    assert commits.read(tmp_path) == [COMMIT, bare, structs.replace(COMMIT, loss=None)]
    path = tmp_path / "commits.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert len(commits.read(tmp_path)) == 2
    CommitLog(tmp_path).close()  # the next life of the replica
    log = CommitLog(tmp_path)
    log.write(COMMIT)
    log.close()
    path.write_bytes(path.read_bytes() + b'\n[3]\n{"step": -1}\n\xff\n')
    assert commits.read(tmp_path) == [COMMIT, bare, COMMIT]
    assert commits.read(tmp_path / "gone") == []
    assert commits.read(tmp_path, 1 << 20) == [COMMIT, bare, COMMIT]
    assert commits.read(tmp_path, len(whole)) == [bare, COMMIT]


def test_factors_of_the_learning_rate():
    assert [factor(3, 4, mode) for mode in MODES] == [1.0, 0.75, 0.75**0.5]
    assert {factor(n, n, mode) for mode in MODES for n in (1, 12)} == {1.0}
    assert DEFAULT == "sqrt"


def test_one_step_at_another_rate_and_then_exactly_the_old_one():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}], lr=7.0)
    kept = torch.tensor(0.3)
    groups = [*optimizer.param_groups, {"lr": kept}, {"params": []}, optimizer.param_groups[0]]
    weight.grad = torch.ones(2)
    with scaled(groups, factor(1, 4)):
        optimizer.step()
        assert groups[1]["lr"].item() == pytest.approx(0.15)
    assert weight.tolist() == pytest.approx([-0.05, -0.05])
    assert (groups[0]["lr"], groups[1]["lr"]) == (0.1, kept)
    assert groups[1]["lr"] is kept
    with pytest.raises(RuntimeError), scaled(groups, 0.5):
        raise RuntimeError
    assert groups[0]["lr"] == 0.1


def test_the_positions_of_the_last_step_are_written_when_the_records_are_closed(tmp_path):
    records = Records(tmp_path, tmp_path, replica=0, batch=4)
    for step in range(1, 101):
        after = SimpleNamespace(step=step, assignment=SampleAssignment(2, 4), positions={0: 4 * step, 1: 4 * step})
        quorum = SimpleNamespace(number=step, healthy=(0, 1), behind=())
        records.committed(after, quorum, Work(None), step - 1, 4 * step - 4, 0.1, 0.0, None)
    records.close()
    assert [commit.step for commit in commits.read(tmp_path)] == list(range(1, 101))
    assert loader_state.read(tmp_path) == LoaderState(100, 100, 4, SampleAssignment(2, 4), {0: 400, 1: 400})


def test_a_replica_comes_back_whatever_has_become_of_the_file(tmp_path):
    place = ReplicaContext(replica=1, replicas=3, run_dir=tmp_path, host="127.0.0.1", comes_back=True)
    assert initial_assignment(place, {}, 0, 0, 2) == (SampleAssignment(3, 2), {0: 0, 1: 0, 2: 0})
    loader_state.write(tmp_path, STATE)
    assert initial_assignment(place, {}, 0, 0, 2) == (ASSIGNMENT, STATE.positions)
    (tmp_path / "loader_state").write_bytes(b'{"for')
    assert initial_assignment(place, {}, 0, 0, 2)[0] == SampleAssignment(3, 2)
