"""The report of FT-HSDP: what survived, the audit, stalls, lanes, effective time; from runs that never were."""

import dataclasses
import random
from itertools import pairwise

import msgspec
import pytest
from hsdp_runs import SEQ, Run, eventful
from msgspec.structs import replace

from ft import faults
from ft.observe.report.lineage import FAILURE, REJOIN, RESTART, lineage
from ft.observe.report.page import page
from ft.observe.report.record import CATCHING_UP, OFFLINE, ONLINE, REBUILDING, asynchronous, load
from ft.observe.report.text import facts
from ft.systems.hsdp import commits

SEEDS = range(25)


def told(run: Run):
    run.close()
    return load(run.folder)


def rewrite(run: Run, replica: int, change) -> None:
    """Every line of a replica through `change`: a commit, or None to drop it."""
    folder = run.folder / f"replica-{replica}"
    lines = [changed for commit in commits.read(folder) if (changed := change(commit)) is not None]
    (folder / "commits.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def rewrite_all(run: Run, change) -> None:
    for replica in range(run.replicas):
        rewrite(run, replica, change)


def test_a_run_without_faults(tmp_path):
    run = Run(tmp_path)
    run.steps(20)
    run.finish()
    story = told(run)
    assert story.audit.is_clean
    assert (story.audit.trained, story.audit.waiting, story.audit.earlier) == (240, 0, 0)
    assert story.audit.replicas == {0: 80, 1: 80, 2: 80}
    assert story.incidents == []
    assert [lane.state for lane in story.lanes] == [REBUILDING, ONLINE] * 3
    assert story.effective.measured == pytest.approx(1.0, abs=0.01)
    assert story.effective.formula is None
    assert story.losses.over == "tokens"
    assert story.losses.points[0] == (12 * SEQ, 6.0)
    assert story.losses.points[-1][0] == 240 * SEQ
    assert story.state == "finished"
    faults.write(tmp_path / "replica-1" / "faults.n0.json", [faults.Fault(1, "kill", step=3, rank=0)])
    missed = "1 of 1 planned fault(s) did not happen: kill of rank 0 at step 3 of replica-1"
    assert ("faults", missed) in facts(story) and missed in page(story, b"")


def killed_and_back(folder) -> Run:
    """Replica 1 dies in step 11, which takes 0.4 s; comes back after 5 steps; fetches in one of 0.15 s."""
    run = Run(folder)
    run.steps(10)
    run.step(by=set(), took=0.3)
    run.dies(1)
    run.steps(1)
    run.builds(1)
    run.steps(4)
    run.returns(1)
    run.step(took=0.15)
    run.steps(10)
    run.finish()
    return run


def test_a_replica_dies_and_comes_back(tmp_path):
    story = told(killed_and_back(tmp_path))
    assert story.audit.is_clean
    assert story.audit.replicas == {0: 104, 1: 80, 2: 104}
    assert story.audit.waiting == 5 * 4 + 4  # of its own stream, below the furthest sample
    failure, rejoin = story.incidents
    assert (failure.kind, failure.replicas, failure.first, failure.retries) == (FAILURE, (1,), 11, 1)
    assert failure.stall_s == pytest.approx(0.3, abs=1e-3)
    assert "connection broke" in failure.reason
    assert (rejoin.kind, rejoin.replicas, rejoin.first, rejoin.last) == (REJOIN, (1,), 16, 17)
    assert rejoin.stall_s == pytest.approx(0.05, abs=2e-3)
    assert rejoin.away_s[0] == pytest.approx(0.4 + 0.4 + 0.15, abs=2e-3)
    states = [(lane.state, round(lane.end - lane.begin, 2)) for lane in story.lanes if lane.replica == 1]
    assert states == [
        (REBUILDING, 0.5),
        (ONLINE, 1.3),
        (OFFLINE, 0.1),
        (REBUILDING, 0.4),
        (CATCHING_UP, 0.15),
        (ONLINE, 1.0),
    ]
    useful = (10 + 10) * 0.1 + 6 * 0.1 * 2 / 3
    assert story.effective.measured == pytest.approx(useful / story.effective.wall_s, abs=2e-3)
    assert story.effective.stall_s == pytest.approx(0.35, abs=2e-3)
    by_hand = asynchronous(story.effective.wall_s, rejoin.away_s[0], 0.35, 3)
    assert story.effective.formula == pytest.approx(by_hand, abs=2e-3)
    # One run, one failure: the formula and the measurement tell the same.
    assert story.effective.formula == pytest.approx(story.effective.measured, abs=0.02)


def test_the_papers_figures():
    assert round(asynchronous(18, 10, 3, 12), 2) == 0.80
    assert asynchronous(18, 10, 3, 12) == pytest.approx((8 + 7 * 11 / 12) / 18)
    assert asynchronous(10, 30, 3, 4) == pytest.approx(7 * 3 / 4 / 10)
    assert asynchronous(10, 1, 3, 4) == pytest.approx(0.7)
    assert asynchronous(1, 1, 3, 4) == 0


def test_a_step_that_one_committed_and_the_others_did_again(tmp_path):
    run = Run(tmp_path)
    run.steps(5)
    gone = run.step(by={2})
    run.dies(2)
    run.steps(3)
    run.returns(2)
    run.steps(3)
    story = told(run)
    assert story.audit.is_clean
    [lost] = story.lineage.superseded
    assert (lost.number, lost.commit.quorum) == gone
    assert list(lost.by) == [2]
    assert [step.number for step in story.steps] == list(range(1, 12))
    samples = run.trained[run.state[0].step, run.state[0].lineage]
    assert len(samples) == story.audit.trained == len(set(samples))


def test_one_that_committed_alone_and_lives_leads(tmp_path):
    run = Run(tmp_path)
    run.steps(5)
    run.step(by={2})
    run.steps(2)
    story = told(run)
    assert story.audit.is_clean
    assert story.lineage.superseded == []
    step = story.steps[6].commit
    assert (step.healthy, step.behind) == ((2,), (0, 1))
    assert story.incidents[0].kind == FAILURE
    assert story.incidents[0].replicas == (0, 1)
    assert story.incidents[1].replicas == (0, 1)


def test_a_full_restart_with_another_number_of_replicas(tmp_path):
    run = Run(tmp_path)
    run.steps(5)
    run.dies(1)
    run.steps(4)
    checkpoint = run.step()
    run.steps(7)
    run.again(checkpoint, 2)
    run.steps(6)
    run.finish()
    story = told(run)
    assert story.audit.is_clean, story.audit
    assert [step.number for step in story.steps] == list(range(1, 17))
    assert [step.number for step in story.lineage.superseded] == list(range(11, 18))
    assert story.audit.earlier == 0
    failure, restart = story.incidents
    assert (failure.kind, failure.first) == (FAILURE, 6)
    assert (restart.kind, restart.first, restart.replicas) == (RESTART, 11, (0, 1))
    assert restart.stall_s == pytest.approx(7 * 0.1 + 2.0 + 0.5, abs=0.01)
    assert story.steps[-1].commit.assignment.replicas == 2


def test_a_run_that_goes_on_from_another_folders_checkpoint(tmp_path):
    run = Run(tmp_path / "a")
    run.steps(5)
    held = run.state[0]
    later = Run(tmp_path / "b")
    later.begin(dataclasses.replace(held, lineage=0))
    later.steps(4)
    story = told(later)
    assert story.audit.is_clean
    assert (story.audit.earlier, story.audit.trained) == (60, 48)
    assert story.lineage.missing == []


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_every_sample_is_found_once(seed, tmp_path):
    run, last = eventful(tmp_path, seed)
    story = told(run)
    assert story.audit.is_clean, f"seed {seed}: {story.audit}"
    assert (story.steps[-1].number, story.steps[-1].commit.quorum) == last
    samples = run.trained[last]
    assert len(set(samples)) == len(samples) == story.audit.trained, f"seed {seed}"
    assert story.audit.waiting == max(samples) + 1 - len(samples)
    assert sum(len(s.by) for s in (*story.steps, *story.lineage.superseded)) == sum(
        len(one.commits) for one in story.replicas.values()
    )
    assert 0 < story.effective.measured <= 1
    for replica in range(story.count):
        own = [lane for lane in story.lanes if lane.replica == replica]
        assert all(a.end <= b.begin and (a.end, a.state) != (b.begin, b.state) for a, b in pairwise(own)), (
            f"seed {seed}"
        )


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
    assert not audit.is_clean
    assert audit.gaps == moved, f"seed {seed}: {audit}"
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
    assert not audit.is_clean
    assert audit.gaps == (run.batch if ahead else 0), f"seed {seed}: {audit}"
    assert audit.duplicates == (0 if ahead else run.batch), f"seed {seed}: {audit}"
    assert any(f"step {at + 1}: replica {replica} was at" in text for text in audit.problems)


def test_members_that_say_different_things_are_found(tmp_path):
    run = Run(tmp_path)
    run.steps(6)
    rewrite(run, 1, lambda c: replace(c, healthy=(0, 1)) if c.step == 4 else c)
    rewrite(run, 2, lambda c: replace(c, before=99) if c.step == 5 else c)
    audit = told(run).audit
    assert not audit.is_clean
    assert any("step 4 of quorum 4: replica 1 has another healthy" in text for text in audit.problems)
    assert any("step 5 of quorum 5: replica 2 has another before" in text for text in audit.problems)


def test_replicas_that_differ_are_found(tmp_path):
    run = Run(tmp_path)
    run.steps(6)
    rewrite_all(run, lambda c: replace(c, digest=c.step))
    story = told(run)
    assert story.audit.is_clean
    assert ("replicas", "equal bit for bit after 6 of 6 steps compared") in facts(story)
    rewrite(run, 1, lambda c: replace(c, digest=7) if c.step == 4 else c)
    story = told(run)
    assert any("step 4 of quorum 4: replica 1 has another state" in text for text in story.audit.problems)
    assert ("replicas", "equal bit for bit after 5 of 6 steps compared") in facts(story)
    rewrite(run, 0, lambda c: replace(c, parameters=1))
    rewrite(run, 1, lambda c: replace(c, parameters=2 if c.step == 5 else 1))
    problems = told(run).audit.problems
    assert [text for text in problems if "another model" in text and "step 5 of quorum 5: replica 1" in text]
    assert sum("another model" in text for text in problems) == 1, "one that was behind has computed nothing"


def test_steps_on_nobodys_record_are_not_proven(tmp_path):
    run = Run(tmp_path)
    run.steps(12)
    rewrite_all(run, lambda c: None if c.step in (5, 6) else c)
    story = told(run)
    assert story.lineage.missing == [(5, 6)]
    assert (story.audit.unproven, story.audit.gaps, story.audit.duplicates) == (24, 0, 0)
    assert not story.audit.is_clean


def test_a_replica_without_a_folder_is_known_from_the_others(tmp_path):
    run = killed_and_back(tmp_path)
    for path in sorted((tmp_path / "replica-1").iterdir()):
        path.unlink()
    (tmp_path / "replica-1").rmdir()
    story = told(run)
    assert story.audit.is_clean
    assert story.count == 3
    assert story.audit.replicas[1] == 80
    assert {lane.state for lane in story.lanes if lane.replica == 1} >= {ONLINE, OFFLINE, CATCHING_UP}


def test_lanes_without_a_single_event(tmp_path):
    run = killed_and_back(tmp_path)
    for path in tmp_path.rglob("events.jsonl"):
        path.unlink()
    story = told(run)
    assert [lane.state for lane in story.lanes if lane.replica == 1] == [ONLINE, OFFLINE, CATCHING_UP, ONLINE]
    assert [one.kind for one in story.incidents] == [FAILURE, REJOIN]


def test_a_replica_that_has_no_samples_is_a_problem_and_no_crash(tmp_path):
    run = Run(tmp_path)
    run.steps(4)
    rewrite_all(run, lambda c: replace(c, healthy=(0, 1, 2, 7)) if c.step == 3 else c)
    assert any("replica 7 trained, but has no samples" in text for text in told(run).audit.problems)


def test_nothing_committed_yet(tmp_path):
    story = told(Run(tmp_path))
    assert story.audit.is_clean
    assert story.steps == []
    assert lineage({}).steps == []
    assert story.effective.measured is None
