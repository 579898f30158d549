"""The step-level simulation of SPARe: against the paper's Table 2, its properties, and its scenario files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ft import cli
from ft.lab.simulate.spare.clocks import Weibull
from ft.lab.simulate.spare.run import PARTS, Jitter, Job, run
from ft.lab.simulate.spare.scenario import read_file, scenario
from ft.lab.simulate.spare.study import build, row, study

EXAMPLES = Path(__file__).parent.parent.parent / "examples/spare"
WEEK = Job(groups=200, steps=10_000, stack_s=64.0, all_reduce_s=2.0, restart_s=3600.0, save_s=60.0)
SMALL = Job(groups=24, steps=300, stack_s=64.0, all_reduce_s=2.0, restart_s=3600.0, save_s=60.0)


def ask(words: str, capsys):
    assert cli.main(["plan", "spare", "simulate", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(words: str, capsys) -> str:
    assert cli.main(["plan", "spare", "simulate", *words.split()]) == 2
    said = capsys.readouterr().err
    assert "fix:" in said
    return said


# --- the published results --------------------------------------------------------------------------------------------

TABLE_2 = {
    (200, "spare"): (9, 2.92, 0.8700),
    (200, "replication"): (3, 6.07, 0.6174),
    (600, "spare"): (9, 2.49, 0.9390),
    (600, "replication"): (3, 4.27, 0.7989),
    (1000, "spare"): (9, 2.34, 0.9654),
    (1000, "replication"): (3, 3.88, 0.8441),
}
"""(groups, scheme): redundancy, time-to-train over T_0, up-fraction."""


@pytest.mark.parametrize(("groups", "scheme"), TABLE_2)
def test_table_2_comes_out_with_the_examples(groups, scheme):
    """Time-to-train within 8 %, up-fraction within 2.5 points: of three seeds, with one draw of jitter a stack."""
    redundancy, ttt_norm, up_fraction = TABLE_2[groups, scheme]
    asked = scenario(read_file(EXAMPLES / f"table1_n{groups}.toml"))
    found = row(asked, asked.failures(), scheme, redundancy).found
    print(found)
    assert found["ttt_norm"].mean == pytest.approx(ttt_norm, rel=0.08)
    assert found["up_fraction"].mean == pytest.approx(up_fraction, abs=0.025)


def test_checkpoints_alone_make_almost_no_progress(capsys):
    found = ask(f"{EXAMPLES}/table1_n200.toml --scheme checkpoint --seeds 1 --limit 5", capsys)
    assert found["given_up"] == 1 and found["progress"] < 0.01
    assert found["ttt_norm"] is None or found["ttt_norm"] > 100


def test_replication_is_flattered_less_by_one_draw_for_a_step():
    """The paper draws once for all stacks of a replica: its time for N = 200 comes out nearer with that."""
    asked = scenario(read_file(EXAMPLES / "table1_n200.toml"))
    stack = row(asked, asked.failures(), "replication", 3).found["ttt_norm"].mean
    asked = replace(asked, job=replace(asked.job, jitter_per="step"))
    assert stack < row(asked, asked.failures(), "replication", 3).found["ttt_norm"].mean


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["spare", "checkpoint"])
def test_without_failures_and_jitter_it_takes_exactly_its_time(scheme):
    calm = replace(SMALL, jitter=0.0)
    found = run(calm, build(24, scheme, 4 if scheme == "spare" else 1), Weibull(math.inf, 1.0), math.inf, 0)
    assert found.total_s == pytest.approx(calm.base_s)
    assert (found.steps, found.attempts, found.stacks_per_step, found.restarts) == (300, 300, 1.0, 0)
    assert found.up_fraction == 1.0 and found.availability == 1.0


def test_without_failures_jitter_is_the_maximum_over_groups():
    found = run(SMALL, build(24, "spare", 4), Weibull(math.inf, 1.0), math.inf, 0)
    rng = np.random.default_rng(1)
    slowest = rng.standard_normal((20_000, 24)).max(axis=1).mean()
    expected = (64.0 * (1 + 0.05 * slowest) + 2.0) / 66.0
    assert found.total_s / SMALL.base_s == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("stacks", [1, 3])
def test_the_slowest_group_is_drawn_from_the_distribution_of_the_maximum(stacks):
    rng = np.random.default_rng(2)
    jitter = Jitter(0.05, "stack", np.random.default_rng(3))
    drawn = np.array([jitter.slowest(10.0, stacks, 50) for _ in range(20_000)])
    sums = (10.0 * (1 + 0.05 * rng.standard_normal((20_000, stacks, 50)))).sum(axis=1).max(axis=1)
    assert drawn.mean() == pytest.approx(sums.mean(), rel=0.002)
    assert drawn.std() == pytest.approx(sums.std(), rel=0.05)


def test_the_parts_add_up_to_the_whole():
    found = run(replace(WEEK, steps=2000), build(200, "spare", 4), Weibull(60_000.0, 0.78), 1500.0, 4)
    assert found.restarts > 0 and found.patches > 0
    assert sum(getattr(found, part) for part in PARTS) == pytest.approx(found.total_s)
    assert found.steps == 2000


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    crew, law = build(200, "spare", 5), Weibull(60_000.0, 0.78)
    found = []
    for seed in (7, 7, 8):
        crew.reset()
        found.append(run(replace(WEEK, steps=500), crew, law, 1500.0, seed))
    assert found[0] == found[1] != found[2]


def test_more_redundancy_makes_fewer_restarts(capsys):
    found = ask("--groups 200 --mtbf 5m --redundancy 2,4,8,12 --steps 3000 --seeds 2", capsys)
    restarts = [each["restarts"] for each in found]
    assert restarts == sorted(restarts, reverse=True) and restarts[0] > 2 * restarts[-1]
    up = [each["up_fraction"] for each in found]
    assert up == sorted(up)


def test_replication_of_degree_1_is_training_with_checkpoints_alone(capsys):
    words = "--groups 40 --mtbf 1h --steps 1000 --scheme replication,checkpoint --degree 1 --seeds 2"
    first, second = ask(words, capsys)
    assert first.pop("scheme") != second.pop("scheme")
    assert first == second


def test_what_is_published_needs_clocks_that_run_on_in_a_restart():
    asked = scenario({"groups": 200, "mtbf": 300.0, "steps": 4000, "seeds": 2})
    restart = {}
    for how in ("extend", "replace", "ignore"):
        asked = replace(asked, job=replace(asked.job, restart=how))
        found = row(asked, asked.failures(), "spare", 9)
        restart[how] = sum(r.restart_s for r in found.results) / sum(r.restarts for r in found.results)
    assert restart["extend"] > 5000 > restart["replace"] > 3600
    assert 5000 > restart["ignore"] > 3600


# --- the command and its input ----------------------------------------------------------------------------------------


def test_the_keys_of_one_case(capsys):
    found = ask("--groups 24 --mtbf 5m --steps 50 --redundancy 4 --seeds 2", capsys)
    measures = {"ttt_norm", "up_fraction", "availability", "restarts", "stacks_per_step"}
    assert measures <= set(found) and set(found["confidence"]) == measures
    assert sum(found["parts_s"].values()) / (50 * 64.24) == pytest.approx(found["ttt_norm"], rel=1e-6)


def test_the_table_names_every_case_and_what_its_columns_are(capsys):
    words = (
        "plan spare simulate --groups 24 --mtbf 5m --steps 50 --redundancy 2..4 --scheme spare,replication --seeds 2"
    )
    assert cli.main(words.split()) == 0
    text = capsys.readouterr().out
    assert text.count("SPARe ") == 3 and text.count("replication ") == 3
    for word in ("time to train", "up", "95 % confidence", "24 groups, 50 steps", "Weibull, shape 0.78"):
        assert word in text


def test_flags_count_more_than_the_scenario_file(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('[job]\ngroups = 24\nsteps = 10\n[failures]\nmtbf = "2m"\n[schemes]\nredundancy = [2, 3]\n')
    asked = scenario({**read_file(file), "steps": 20})
    assert (asked.job.steps, asked.mtbf_s, asked.redundancy) == (20, 120.0, (2, 3))
    assert len(list(study(replace(asked, seeds=1)))) == 2


def test_failures_of_a_trace_strike_when_it_says(tmp_path, capsys):
    trace = tmp_path / "trace.txt"
    trace.write_text("# second, group\n100, 3\n150 5\n\n100000000 4  # never\n")
    found = ask(f"--groups 24 --law trace --trace {trace} --mtbf 1h --steps 50 --jitter 0 --redundancy 4", capsys)
    assert found["restarts"] == 0 and found["parts_s"]["shrink_s"] > 0
    trace.write_text("".join(f"100 {group}\n" for group in range(24)))
    assert ask(f"--groups 24 --law trace --trace {trace} --mtbf 1h --steps 50 --redundancy 4", capsys)["restarts"] == 1


def test_several_numbers_of_groups_are_asked_for_at_once(capsys):
    found = ask("--groups 24,30 --mtbf 5m --steps 20 --redundancy 3..4 --seeds 1", capsys)
    assert [(one["groups"], one["redundancy"]) for one in found] == [(24, 3), (24, 4), (30, 3), (30, 4)]


@pytest.mark.parametrize("groups", [200, 600, 1000])
def test_the_examples_are_table_1(groups):
    asked = scenario(read_file(EXAMPLES / f"table1_n{groups}.toml"))
    job = asked.job
    assert (job.groups, job.steps, job.stack_s, job.all_reduce_s) == (groups, 10_000, 64.0, groups / 100)
    assert (asked.mtbf_s, asked.law, asked.shape, job.restart) == (300.0, "weibull", 0.78, "extend")
    assert (job.restart_s, job.save_s, job.shrink_s, job.controller_s, job.jitter) == (3600.0, 60.0, 0.1, 0.1, 0.05)
    assert asked.redundancy[-1] == {200: 12, 600: 20, 1000: 26}[groups]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", "the number of groups is missing"),
        ("--groups 24", "the mean time between two failures is missing"),
        ("--groups 1 --mtbf 5m", "--groups 1"),
        ("--groups 30..24 --mtbf 5m", "is empty"),
        ("--groups many --mtbf 5m", "neither a number nor a range"),
        ("--groups 24 --mtbf=-5", "--mtbf -5"),
        ("--groups 24 --mtbf 0", "--mtbf 0"),
        ("--groups 24 --mtbf 5m --restart=-1h", "--restart -1h"),
        ("--groups 24 --mtbf 5m --steps 0", "--steps 0"),
        ("--groups 24 --mtbf 5m --redundancy 5..3", "the range '5..3' is empty"),
        ("--groups 24 --mtbf 5m --redundancy x", "neither a number nor a range"),
        ("--groups 24 --mtbf 5m --redundancy 1", "redundancy 1"),
        ("--groups 24 --mtbf 5m --redundancy 25", "redundancy 25 with 24 groups"),
        ("--groups 24 --mtbf 5m --redundancy 12", "largest redundancy"),
        ("--groups 24 --mtbf 5m --scheme replication --degree 0", "degree 0"),
        ("--groups 24 --mtbf 5m --scheme raid", "none of spare"),
        ("--groups 24 --mtbf 5m --law normal", "none of weibull"),
        ("--groups 24 --mtbf 5m --law exponential --shape 2", "has no shape"),
        ("--groups 24 --mtbf 5m --law none", "no failures"),
        ("--groups 24 --mtbf 5m --law trace", "need each other"),
        ("--groups 24 --mtbf 5m --law trace --trace {folder}/none", "cannot be read"),
        ("--groups 24 --mtbf 5m --law trace --trace {folder}/words", "line 2 of"),
        ("--groups 24 --mtbf 5m --law trace --trace {folder}/far", "names group 24"),
        ("--groups 24 --mtbf 5m --law trace --trace {folder}/empty", "contains no failure"),
        ("--groups 24 --mtbf 5m --jitter 2", "not a number from 0 to 0.3"),
        ("--groups 24 --mtbf 5m --seeds 0", "--seeds 0"),
        ("{folder}/nowhere.toml", "cannot be read"),
        ("{folder}/words", "cannot be read"),
        ("{folder}/key.toml", "[job] has no 'group'"),
        ("{folder}/section.toml", "'jobs' is not a section"),
        ("{folder}/value.toml", "steps = -3"),
    ],
)
def test_input_that_cannot_work_is_refused_with_a_reason(words, part, tmp_path, capsys):
    (tmp_path / "words").write_text("3 1\ntwelve\n")
    (tmp_path / "far").write_text("3 24\n")
    (tmp_path / "empty").touch()
    (tmp_path / "key.toml").write_text("[job]\ngroup = 3\n")
    (tmp_path / "section.toml").write_text("[jobs]\ngroups = 3\n")
    (tmp_path / "value.toml").write_text("[job]\ngroups = 30\nsteps = -3\n")
    assert part in refused(words.format(folder=tmp_path), capsys)
