"""The fault campaign of FT-HSDP: what it plans, what it says, and that it sees what is wrong."""

import random
import sys

import hsdp_runs
import pytest
from ft_runs import ROOT
from replica_runs import Done, proof

sys.path.insert(0, str(ROOT / "tools" / "experiments"))

import hsdp_campaign as campaign
import hsdp_campaign_report as report

from ft import faults as inject
from ft.job.replicas import places
from ft.job.replicas.places import LauncherPart


def test_over_the_seeds_every_kind_comes_and_a_seed_decides_everything():
    plans = [campaign.plan(seed) for seed in range(10)]
    assert plans == [campaign.plan(seed) for seed in range(10)]
    assert {one.kind for plan in plans for one in plan} == set(campaign.KINDS)
    assert sum(map(len, plans)) == 200


def test_every_fault_can_be_planned_and_comes_early_enough():
    shape = LauncherPart(0, 1, 0, campaign.RANKS)
    for seed in range(10):
        plan = campaign.plan(seed)
        specs, _ = inject.read_specs([spec for one in plan for spec in one.specs], None, None)
        planned = [fault for some in places.plan_faults(specs, campaign.REPLICAS, shape, 0).values() for fault in some]
        assert len(planned) == len(specs) and all(fault.step < campaign.steps_of(campaign.FAULTS) for fault in planned)
        assert len({one.step for one in plan}) == len(plan)


def test_a_sound_record_has_no_problems_and_each_thing_that_is_wrong_is_named(tmp_path):
    run = hsdp_runs.Run(tmp_path)
    for _ in range(3):
        run.step(digest=1)
    assert proof(tmp_path).problems(3, 0) == []
    assert "surviving steps" in " ".join(proof(tmp_path).problems(4, 0))
    run.step(by={0}, digest=1)  # committed by one that is lost: the others do it again
    run.alive = {1, 2}
    run.step(digest=1)
    assert proof(tmp_path).problems(4, 1) == []
    assert "superseded" in " ".join(proof(tmp_path).problems(4, 0))
    run.step()
    assert "digests" in " ".join(proof(tmp_path).problems(5, 1))


def test_a_checkpoint_that_is_loaded_while_a_replica_lives_is_seen(tmp_path):
    run = hsdp_runs.Run(tmp_path)
    keys = [run.step(digest=1) for _ in range(4)]
    run.again(keys[1], 3)
    run.step(digest=1)
    (load,) = campaign.reloads(Done(0, "", tmp_path))
    assert (load.step, load.holders) == (3, (0, 1, 2))


def test_what_a_load_takes_back_is_no_step_done_anew_and_each_failure_may_cost_one_only_where_it_was(tmp_path):
    run, done = hsdp_runs.Run(tmp_path), Done(0, "", tmp_path)
    keys = [run.step(digest=1) for _ in range(3)]
    run.step(by={0}, digest=1)
    run.alive = {1, 2}
    keys += [run.step(digest=1) for _ in range(3)]
    early = hsdp_runs.START + run.now
    assert campaign.redone(done, [early], campaign.reloads(done)) == []
    for _ in range(2):  # the same checkpoint twice: what comes in between is lost, and no step done anew
        run.again(keys[2], 3)
        run.step(digest=1)
        run.step(digest=1)
    loads = campaign.reloads(done)
    assert [load.step for load in loads] == [4, 4]
    assert campaign.redone(done, [early], loads) == [] and campaign.redone(done, [], loads)
    run.step(by={2}, digest=1)
    run.alive = {0, 1}
    run.step(digest=1)
    late = hsdp_runs.START + run.now
    assert campaign.redone(done, [early, late], loads) == []
    (problem,) = campaign.redone(done, [early, early], loads)
    assert "superseded" in problem and "at most 0" in problem


def test_the_table_counts_what_came():
    faults = [{"kind": "kill", "left": True, "reload": False, "stall_s": 0.2, "back_s": 1.5}]
    runs = [
        {"seed": 0, "inject": "", "problems": [], "faults": faults},
        {"seed": 1, "inject": "kill@step=3", "problems": ["exit code 1"], "faults": faults},
    ]
    text = report.table(runs)
    assert "2 faults in 2 runs" in text and "sound: 1, not: 1" in text
    assert "seed 1: exit code 1" in text and "0.20" in text and "1.50" in text


@pytest.mark.long
def test_a_short_campaign(corpus, tmp_path):
    faults, seeds = 4, iter(lambda: random.randrange(1 << 20), None)
    seed = next(one for one in seeds if not {f.kind for f in campaign.plan(one, faults)} & set(campaign.HOLDING_UP))
    print(f"seed {seed}: {','.join(spec for one in campaign.plan(seed, faults) for spec in one.specs)}")
    entry = campaign.run_one(seed, tmp_path, corpus, faults)
    assert not entry["problems"], (tmp_path / f"seed-{seed}.problem").read_text()
    assert len(entry["faults"]) >= 2, entry  # one in a replica that is away by then does not come
