"""The experiment on rebuilt stages and the loss: its failures and figures, and a tiny run of it."""

import math
import random
import sys

import pytest
import small_runs as runs
from ft_runs import ROOT

sys.path.insert(0, str(ROOT / "tools" / "experiments"))

import checkfree_convergence as experiment
import checkfree_convergence_job as job
import checkfree_convergence_report as report
from checkfree_convergence import ENDS, MIDDLE, STRAIGHT, SWAPPED, Setting


def test_failures_come_one_at_a_time_as_often_as_asked_and_alike_for_all_strategies():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    settings = [Setting(MIDDLE, way, 2.0, seed) for way in experiment.STRATEGIES]
    (plan,) = {tuple(experiment.failures(each.at_risk, each.rate, 20_000, each.seed)) for each in settings}
    steps = [step for step, _ in plan]
    assert steps == sorted(set(steps)) and steps[0] >= experiment.FIRST and steps[-1] <= 20_000 - experiment.REST
    for stage in (1, 2):
        assert 300 < sum(lost == stage for _, lost in plan) < 500
    assert {stage for _, stage in plan} == {1, 2}
    assert experiment.failures((0, 3), 0.0, 300, seed) == []


def test_every_part_has_a_run_without_failures_and_no_run_is_there_twice():
    found = list(experiment.settings(experiment.PARTS, 2))
    assert len(found) == len(set(found))
    for part in (MIDDLE, experiment.EQUAL, ENDS):
        assert {each.seed for each in found if each.part == part and not each.rate} == {0, 1}
    assert {each.way for each in found if each.part == ENDS} == {SWAPPED, STRAIGHT}


def row(part: str, way: str, rate: float, *rebuilt: tuple[int, int, float, int | None]) -> dict:
    made = [
        {"step": step, "stage": stage, "strategy": way, "weights": [1, 0], "before": 2.0, "after": 2.0 + jump,
         "good_after": good, "seconds": 0.01}
        for step, stage, jump, good in rebuilt
    ]  # fmt: skip
    losses = [4.0 - step / 100 for step in range(100)]
    return {"part": part, "way": way, "rate": rate, "seed": 0, "steps": 100, "train": losses,
            "held_out": [(100, 3.1)], "rebuilt": made, "took_s": 1.0}  # fmt: skip


def test_the_table_tells_jumps_steps_until_made_good_and_how_much_swapped_training_helps(tmp_path):
    rows = [
        row(MIDDLE, "no failures", 0.0),
        row(MIDDLE, "weighted", 2.0, (20, 1, 0.25, 8), (60, 2, 0.75, None), (70, 1, 0.5, 4)),
        row(ENDS, SWAPPED, 1.0, (20, 0, 0.125, 3), (40, 3, 0.25, 3)),
        row(ENDS, STRAIGHT, 1.0, (20, 0, 1.0, None), (40, 3, 0.5, None)),
        {**row("cross", "stage 0", 0.0, (50, 0, 0.125, 3)), "real": [4.0 - step / 100 for step in range(100)]},
    ]
    assert report.made_good(rows[1:2]) == (6, 2, 3) and report.jumps(rows, [3]) == [0.25, 0.5]
    assert report.ratio(rows, 0) == 8.0 and report.ratio(rows[:3], 0) is None
    assert report.last_loss(rows[0]) == pytest.approx(3.105)
    assert report.training_jump([3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.5], 6) == 0.5
    text = report.write(rows, tmp_path)
    assert "+0.500 (+0.750)" in text and "6 (2 of 3)" in text and "8.0 x less with swapped training" in text
    assert "Largest difference in 100 steps: 0." in text
    assert (tmp_path / report.RESULTS).read_text() == text + "\n" and (
        tmp_path / report.PICTURE
    ).stat().st_size > 10_000


def test_a_loss_is_made_good_once_it_is_where_it_was_and_waited_for_no_longer_than_that():
    made = {"step": 10, "before": 2.0, "good_after": None}
    assert job.look_after(made, 11, 2.5) is made and made["good_after"] is None
    assert job.look_after(made, 13, 2.0) is None and made["good_after"] == 3
    late = {"step": 10, "before": 2.0, "good_after": None}
    assert job.look_after(late, 10 + job.PATIENCE, 2.1) is None and late["good_after"] is None


@pytest.mark.long
def test_a_tiny_run_loses_stages_and_goes_on(ranks, tmp_path):
    corpus = runs.make_corpus(tmp_path)
    for setting in (
        Setting(ENDS, SWAPPED, 8.0, 0),
        Setting(ENDS, STRAIGHT, 8.0, 0),
        Setting(MIDDLE, "uniform", 8.0, 0),
    ):
        made = experiment.run_one(setting, ranks, corpus, 40)
        planned = experiment.failures(setting.at_risk, setting.rate, 40, 0)
        assert planned and [(each["step"], each["stage"]) for each in made["rebuilt"]] == planned
        assert all(math.isfinite(each["after"]) for each in made["rebuilt"])
        assert len(made["train"]) == 40 and all(map(math.isfinite, made["train"]))
        assert sum(made["train"][-5:]) < sum(made["train"][:5])
        experiment.add(tmp_path, made)
    rows = experiment.read(tmp_path)
    assert [one["way"] for one in rows] == [SWAPPED, STRAIGHT, "uniform"]
    assert {each["strategy"] for each in rows[0]["rebuilt"]} == {"copy"} and rows[2]["rebuilt"][0]["weights"] == [
        0.5,
        0.5,
    ]
    assert "weights of their own" in report.table(rows)
