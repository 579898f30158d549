"""The report of FT-HSDP from random runs that never were, and their audit. Single cases: ``conversations/hsdp``."""

import random
from itertools import pairwise

import msgspec
import pytest
from hsdp_runs import Run, eventful
from msgspec.structs import replace

from ft.observe.report.record import load
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
