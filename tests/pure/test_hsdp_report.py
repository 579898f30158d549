"""The report of FT-HSDP from random runs that never were, their audit, its pages. More is in ``conversations/hsdp``."""

import json
import os
import random
import time
from itertools import pairwise

import msgspec
import pytest
from hsdp_runs import Run, eventful
from msgspec.structs import replace
from record_conversations import Page

from ft import cli
from ft.base import events
from ft.observe.report import status
from ft.observe.report.record import load
from ft.platform import election, processes
from ft.systems.hsdp import commits

SEEDS = range(25)


def told(run: Run):
    run.close()
    return load(run.folder)


def rewrite(run: Run, replica: int, change) -> None:
    """Every line of a replica through `change`."""
    folder = run.folder / f"replica-{replica}"
    lines = [change(commit) for commit in commits.read(folder)]
    (folder / "commits.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_every_sample_is_found_once(seed, tmp_path):
    run, last = eventful(tmp_path, seed)
    story = told(run)
    assert story.audit.is_clean, f"seed {seed}: {story.audit}"
    assert (story.steps[-1].number, story.steps[-1].commit.quorum) == last
    samples = run.trained[last]
    assert len(set(samples)) == len(samples) == story.audit.trained, f"seed {seed}"
    assert story.audit.waiting == max(samples) + 1 - len(samples)
    commits_in_steps = sum(len(s.by) for s in (*story.steps, *story.lineage.superseded))
    assert commits_in_steps == sum(len(one.commits) for one in story.replicas.values())
    assert 0 < story.effective.measured <= 1
    for replica in range(story.count):
        own = [lane for lane in story.lanes if lane.replica == replica]
        assert all(a.end <= b.begin and (a.end, a.state) != (b.begin, b.state) for a, b in pairwise(own)), seed


@pytest.mark.parametrize("seed", SEEDS)
def test_torn_lines_cost_nothing_that_another_replica_has(seed, tmp_path):
    rng = random.Random(seed)
    run, _ = eventful(tmp_path, seed)
    whole = told(run)
    for name in ("commits.jsonl", "events.jsonl", "metrics.jsonl"):
        path = tmp_path / f"replica-{rng.randrange(run.replicas)}" / name
        content = path.read_bytes()
        path.write_bytes(content[: rng.randrange(len(content))] + b'\n{"step": 3, "quo\n\x00\xff\n[]\n')
    story = told(run)
    shared = {step.number for step in whole.steps if len(step.by) > 1}
    missing = {n for first, end in story.lineage.missing for n in range(first, end + 1)}
    assert not missing & shared, f"seed {seed}"
    audit = story.audit
    assert (audit.duplicates, audit.gaps, audit.unaccounted) == (0, 0, 0), f"seed {seed}: {audit}"
    assert audit.is_clean or missing, f"seed {seed}: {audit}"


def longest(seed: int, tmp_path):
    """An eventful run and steps in the middle of what survived."""
    run, _ = eventful(tmp_path, seed)
    story = told(run)
    return run, story.steps[len(story.steps) // 3 : -2]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replica_that_read_elsewhere_is_found(seed, tmp_path):
    rng = random.Random(seed)
    run, steps = longest(seed, tmp_path)
    step = rng.choice(steps)
    replica = rng.choice([r for r in step.by if r in step.commit.healthy])
    wrong = max(0, step.by[replica].at + rng.choice([-run.block, run.block, 7 * run.batch]))
    if wrong == step.by[replica].at:
        wrong += run.block
    key = (step.number, step.commit.quorum)
    rewrite(run, replica, lambda c: replace(c, at=wrong) if (c.step, c.quorum) == key else c)
    audit = told(run).audit
    moved = min(run.batch, abs(wrong - step.by[replica].at))
    assert not audit.is_clean and audit.gaps == moved, f"seed {seed}: {audit}"
    assert audit.duplicates + audit.unaccounted == moved, f"seed {seed}: {audit}"
    assert any(f"replica {replica} read from position {wrong}" in text for text in audit.problems)
    assert audit.examples


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ahead", [True, False])
def test_positions_that_jump_are_found(seed, ahead, tmp_path):
    """From a step on the state counts more, or less, as taken by one replica than it has read."""
    rng = random.Random(seed)
    run = Run(tmp_path, replicas=3)
    run.steps(rng.randint(4, 20))
    at = run.number
    run.steps(rng.randint(2, 10))
    replica, by = rng.randrange(3), run.batch if ahead else -run.batch

    def jump(commit):
        if commit.quorum <= at:
            return commit
        moved = {**commit.positions, replica: commit.positions[replica] + by}
        own = commit.at + by if commit.at is not None and run_of == replica else commit.at
        return replace(commit, positions=moved, at=own)

    for run_of in range(3):
        rewrite(run, run_of, jump)
    audit = told(run).audit
    assert not audit.is_clean and audit.gaps == (run.batch if ahead else 0), f"seed {seed}: {audit}"
    assert audit.duplicates == (0 if ahead else run.batch), f"seed {seed}: {audit}"
    assert any(f"step {at + 1}: replica {replica} was at" in text for text in audit.problems)


# --- `ft report` and `ft status` on the folder of a run, and on that of one replica -----------------------------------


def report(folder, capsys) -> tuple[str, Page]:
    """Run `ft report`; return what it printed, and the page."""
    assert cli.main(["report", str(folder)]) == 0
    return capsys.readouterr().out, Page(folder / "report.html")


def small(folder) -> Run:
    run = Run(folder, step_s=0.1)
    run.steps(12)
    run.step(by=set(), took=0.4)
    run.dies(1)
    run.steps(1)
    run.builds(1)
    run.steps(5)
    run.returns(1)
    run.steps(12)
    return run


def test_what_happened_inside_the_replicas_is_reported_and_hostile_text_is_only_text(tmp_path, capsys):
    """Recoveries, mismatches, rebuilt stages and actions of each replica, with markup in every text of the files."""
    run, hostile = small(tmp_path), "</td><script>alert(1)</script><img src=http://evil>"
    place = {"node": hostile, "worker": hostile, "rank": 0, "epoch": 0, "step": 3}
    gravity = {"category": hostile, "action": "replace", "signal": hostile, "reason": hostile}
    run.own(1, events.FAULT_DETECTED, **place, **gravity)
    run.own(1, events.EPOCH_CLOSED, epoch=0, reason=hostile)
    run.own(1, events.EPOCH_OPENED, epoch=1, seats={"0": hostile}, joiners=[0], fresh=False)
    run.own(1, events.RESUMED, epoch=1, step=3)
    run.own(0, events.DMR_COVERED, rank=0, epoch=0, step=1, strategy=hostile, counts={hostile: 3})
    values = {"operator": hostile, "phase": hostile, "host": hostile, "device": hostile, "how": hostile}
    told = {"layer": 1, "microbatch": 0, "elements": 1, "of": 2, "attempt": 1, "note": "", "chunk": 0, "index": 0}
    run.own(0, events.DMR_MISMATCH, rank=0, epoch=0, step=3, **values, **told)
    run.own(0, events.STAGE_REBUILT, epoch=0, step=3, stage=1, strategy=hostile, weights=[1.0], seconds=0.1)
    run.own(2, events.PROTECTION_ACTED, rank=0, step=4, protection=hostile, what=hostile)
    run.server(events.REPLICA_OFFLINE, replica=1, reason=hostile)
    run.finish()
    said, page = report(tmp_path, capsys)
    assert "recovered  1 of 1 interruption inside replicas" in said and "DMR        replica 0: " in said
    assert page.tags.count("img") == 1, "the timeline"
    text = " ".join(page.lines)
    for words in ("Recoveries", "Operators whose two executions", "Other protections", "rebuilt from their neighbours"):
        assert words in text, words
    assert text.count(hostile) > 10


@pytest.mark.parametrize("seed", range(3))
def test_reports_of_whatever_happens(seed, tmp_path, capsys):
    eventful(tmp_path, seed)
    report(tmp_path, capsys)
    assert cli.main(["status", str(tmp_path), "--json"]) == 0


def test_status_as_json_and_watching_to_the_end(tmp_path, capsys):
    run = small(tmp_path)
    run.now = time.time() - 1_700_000_000.0
    run.step()
    run.close()
    assert cli.main(["status", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["healthy"], said["ended"], said["stale"]) == (31, [0, 1, 2], False, False)
    assert [member["state"] for member in said["replicas"]] == ["online"] * 3
    run.finish()
    assert cli.main(["status", str(tmp_path), "--watch"]) == 0
    assert "finished" in capsys.readouterr().out


def test_status_ends_with_1_where_the_launcher_is_dead(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(status, "_SUCCESSION_S", 0.1)
    run = small(tmp_path)
    run.close()
    (tmp_path / "launchers").mkdir()
    record = election.LeaseRecord(0, 0, "", "n0", 1, launcher=processes.identity(os.getpid()))
    election.renew(tmp_path / "launchers", record)
    assert cli.main(["status", str(tmp_path)]) == 0
    gone = processes.identity(os.getpid()) + "0"  # a process of this host that began at another time
    election.renew(tmp_path / "launchers", election.LeaseRecord(0, 0, "", "n0", 1, launcher=gone))
    assert cli.main(["status", str(tmp_path), "--watch"]) == 1
    said = capsys.readouterr().out
    assert "gone (it was training)" in said and "the process ft run on this host has disappeared" in said
