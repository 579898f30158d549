"""What replicas put on record: commits.jsonl, loader_state, and the learning rate of a step."""

from types import SimpleNamespace

import msgspec
import pytest
import torch
from msgspec import structs

from ft.systems.hsdp import commits
from ft.systems.hsdp.commits import Commit, CommitLog, Records
from ft.systems.hsdp.layer import initial_assignment
from ft.systems.hsdp.place import ReplicaContext
from ft.systems.hsdp.samples import Past, SampleAssignment
from ft.systems.hsdp.work import Work, factor, scaled

ASSIGNMENT = SampleAssignment(3, 2, (Past(2, 4, (8, 4), 2),))
COMMIT = Commit(7, 9, 8, (0, 2), (1,), 4, ASSIGNMENT, {0: 20, 1: 16, 2: 20}, 1e9, 0.5, 0.25, 16)


def test_commits_come_back_and_torn_lines_are_left_out(tmp_path):
    log = CommitLog(tmp_path)
    bare = structs.replace(COMMIT, step=8, at=None)
    for commit in (COMMIT, bare, COMMIT):
        log.write(commit)
    log.close()
    assert commits.read(tmp_path) == [COMMIT, bare, COMMIT]
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


def test_the_last_step_is_written_when_the_records_are_closed(tmp_path):
    records = Records(tmp_path, tmp_path, replica=0, batch=4)
    for step in range(1, 101):
        after = SimpleNamespace(step=step, assignment=SampleAssignment(2, 4), positions={0: 4 * step, 1: 4 * step})
        quorum = SimpleNamespace(number=step, healthy=(0, 1), behind=())
        records.committed(after, quorum, Work(None), step - 1, 4 * step - 4, 0.1, 0.0, None)
    records.close()
    assert [commit.step for commit in commits.read(tmp_path)] == list(range(1, 101))
    newest = commits.newest(tmp_path)
    assert newest == commits.read(tmp_path)[-1] and newest.positions == {0: 400, 1: 400}


def test_a_replica_comes_back_whatever_has_become_of_the_file(tmp_path):
    place = ReplicaContext(replica=1, replicas=3, run_dir=tmp_path, host="127.0.0.1", comes_back=True)
    assert initial_assignment(place, {}, 0, 0, 2) == (SampleAssignment(3, 2), {0: 0, 1: 0, 2: 0})
    (tmp_path / "loader_state").write_bytes(msgspec.json.encode(COMMIT))
    assert initial_assignment(place, {}, 0, 0, 2) == (ASSIGNMENT, COMMIT.positions)
    for damaged in (b'{"for', b"[1, 2]", b'{"step": 4}', b"\x00" * 300):
        (tmp_path / "loader_state").write_bytes(damaged)
        assert initial_assignment(place, {}, 0, 0, 2)[0] == SampleAssignment(3, 2)
