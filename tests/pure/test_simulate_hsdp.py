"""``ft simulate hsdp``: the paper's own figures, closed form against simulation, and input that cannot work."""

import json
import random
from dataclasses import replace

import pytest

from ft import cli
from ft.base.errors import UserError
from ft.lab.simulate.hsdp.cases import Job, Stalls, cases, read
from ft.lab.simulate.hsdp.history import EXPONENTIAL, PERIODIC, WEIBULL, Failures, Rules, simulate
from ft.lab.simulate.hsdp.model import Case, by_formula, overlapping

DAY_S = 86400.0
PAPER = Case("paper", "section 6.1", 12, 1080.0, 20.0, 180.0, 600.0)
SYNC = Case("sync", "section 1", 1, 1080.0, 20.0, 600.0, 600.0)
NO_STEPS = 1e-3
"""A step so short that the simulation has none, as the closed form."""


def run(case, family=EXPONENTIAL, days=200.0, seed=1, rules=None):
    print("seed", seed)
    return simulate(case, Failures(family), rules or Rules(1, 0), days * DAY_S, seed)


def asked(words, capsys):
    assert cli.main(["simulate", "hsdp", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- the paper --------------------------------------------------------------------------------------------------------


def test_section_6_1_by_its_formula():
    assert by_formula(SYNC) == pytest.approx((18 - 10) / 18)
    assert by_formula(PAPER) == pytest.approx((8 + 7 * 11 / 12) / 18)
    assert f"{by_formula(SYNC):.0%} {by_formula(PAPER):.0%}" == "44% 80%"


def test_section_6_1_simulated_with_a_failure_at_every_interval():
    assert f"{run(SYNC, PERIODIC).effective:.0%} {run(PAPER, PERIODIC).effective:.0%}" == "44% 80%"


def test_the_stall_that_the_paper_intended_leaves_more():
    assert by_formula(replace(PAPER, stall_s=90.0)) == pytest.approx((8 + 8.5 * 11 / 12) / 18)


def test_the_100_seconds_at_a_return_are_not_in_the_80_percent():
    assert by_formula(replace(PAPER, rejoin_s=100.0)) == pytest.approx((18 - 10 - 100 / 60 + 7 * 11 / 12) / 18)


def test_an_interval_too_short_for_the_formula_leaves_nothing():
    assert by_formula(replace(SYNC, interval_s=300.0)) == 0.0


# --- closed form and simulation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stall_s", "rejoin_s"), [(180.0, 0.0), (90.0, 0.0), (20.0, 5.0), (600.0, 0.0)])
@pytest.mark.parametrize("replicas", [2, 5, 12])
def test_the_simulation_agrees_with_the_closed_form(replicas, stall_s, rejoin_s):
    case = Case("c", "c", replicas, 1080.0, NO_STEPS, stall_s, 600.0, rejoin_s)
    seed = random.SystemRandom().randrange(1 << 32)
    assert run(case, days=300.0, seed=seed).effective == pytest.approx(overlapping(case), abs=0.012)


def test_synchronous_recovery_with_independent_failures_is_a_poisson_gap():
    seed = random.SystemRandom().randrange(1 << 32)
    assert overlapping(SYNC) == pytest.approx(2.718281828 ** (-600 / 1080))
    assert run(SYNC, days=300.0, seed=seed).effective == pytest.approx(overlapping(SYNC), abs=0.012)


def test_rare_failures_cost_what_the_formula_says():
    rare = replace(PAPER, interval_s=100 * 3600.0, rejoin_s=100.0)
    assert 1 - overlapping(rare) == pytest.approx(1 - by_formula(rare), rel=0.01)


def test_all_time_is_accounted_for_and_the_seed_decides_all():
    found = run(PAPER, WEIBULL, seed=7)
    assert sum(found.trained.values()) + found.stalled + found.too_few == pytest.approx(found.lasted)
    assert found == run(PAPER, WEIBULL, seed=7) != run(PAPER, WEIBULL, seed=8)


def test_a_returning_replica_counts_after_the_rest_of_a_step_and_a_whole_one():
    """11 of 12 for 1.5 steps more per failure; with rare failures nothing overlaps."""
    case = replace(PAPER, interval_s=36000.0, step_s=100.0)
    less = run(replace(case, step_s=NO_STEPS), PERIODIC).effective - run(case, PERIODIC).effective
    assert less == pytest.approx(1.5 * 100.0 / 12 / 36000.0, rel=0.4)


def test_below_the_minimum_nobody_trains():
    assert run(PAPER, rules=Rules(12, 0)).trained.keys() == {12}
    assert run(PAPER, rules=Rules(11, 0)).too_few > 0


def test_all_replicas_lost_at_once_go_back_to_the_checkpoint():
    case = Case("two", "two", 2, 300.0, 20.0, 30.0, 600.0)
    kept, undone = run(case), run(case, rules=Rules(1, 100))
    assert undone.losses > 100 and undone.undone > 0 and undone.effective < kept.effective


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_44_and_80_percent(capsys):
    words = "--gpus 98304 --replicas 12 --mtbf 18m --time 5d --no-sweep"
    assert cli.main(["simulate", "hsdp", *words.split()]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "paper's formula" in line)
    assert line.split()[2:6:2] == ["44.4", "80.1"]


def test_more_replicas_and_fewer_failures_leave_more_time(capsys):
    found = asked("--days 8", capsys)
    by_interval = [row["ours"] for _, row in sorted(found["by_interval_min"].items(), key=lambda item: float(item[0]))]
    assert by_interval == sorted(by_interval)
    assert found["by_replicas"]["48"]["ours"] > found["by_replicas"]["2"]["ours"]


def test_stalls_come_from_measurements(tmp_path):
    rows = [("kill", 200, 150), ("kill", 400, 170), ("kill", 300, 160), ("hang", 1500, 160)]
    lines = [
        {"bench": "hsdp_recovery", "kind": kind, "stall_ms": stall, "rejoin_longest_ms": longest, "step_ms": 100.0}
        for kind, stall, longest in rows
    ]
    others = [{"bench": "other"}, lines[1] | {"system": "torchft", "stall_ms": 5000}]
    path = tmp_path / "hsdp_recovery.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*lines, *others]))
    ours = read(str(path))
    assert (ours.killed_s, ours.rejoin_s, ours.hung_s) == (pytest.approx(0.3), pytest.approx(0.06), None)
    named = {case.key: case for case in cases(Job(96, 12, 1080.0, 20.0, 600.0), ours)}
    assert named["ours"].stall_s == pytest.approx(20.3)
    assert named["ours_hang"].stall_s == pytest.approx(20.0 + 61.0), "a hang is noticed in steps"


@pytest.mark.parametrize("text", ["", "{", '{"bench": "hsdp_recovery", "kind": "kill", "stall_ms": null}', "[1]"])
def test_results_without_a_kill_are_refused(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=r"r\.jsonl"):
        read(str(path))


@pytest.mark.parametrize(
    "words",
    ["--gpus 100 --replicas 12", "--replicas 1", "--minimum 13", "--results nowhere.jsonl", "--no-sweep --plot a.png"],
)
def test_questions_that_make_no_sense_are_refused(words, capsys):
    assert cli.main(["simulate", "hsdp", *words.split()]) != 0
    assert capsys.readouterr().err


def test_a_picture_is_drawn(tmp_path, capsys):
    path = tmp_path / "hsdp.png"
    assert cli.main(["simulate", "hsdp", "--days", "2", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_goals_stand_in_where_nothing_was_measured():
    job = Job(96, 12, 1080.0, 20.0, 600.0)
    named = {case.key: case for case in cases(job, Stalls(0.3, 6.0, None, "goals"))}
    assert named["ours_hang"].stall_s == pytest.approx(20.0 + 3 * 20.0 + 1.0)
