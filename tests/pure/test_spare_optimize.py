"""ft plan spare optimize: which redundancy it finds, what it recommends and why."""

import argparse
import json
import math

import pytest

from ft import cli
from ft.base.errors import UserError
from ft.commands import arguments
from ft.job.replicas import flags
from ft.lab.plan.spare.optimum import Choice, optimum
from ft.lab.simulate.spare import theory
from ft.lab.simulate.spare.scenario import scenario
from ft.lab.simulate.spare.study import Estimate, Row
from ft.systems.spare import placement
from ft.systems.spare.ruler import ruler
from megatron.ft_trainer.arguments import parse
from megatron.ft_trainer.launch import launch

FOUR = "--groups 200 --mtbf 5m --restart 1h --save 1m"


def ask(words: str, capsys) -> dict:
    assert cli.main(["plan", "spare", "optimize", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of(redundancy: int, by_theory: float, mean: float | None = None, half: float | None = 0.01) -> Choice:
    """A choice as it comes out of formulas and simulation."""
    found = {"ttt_norm": Estimate(mean, half)} if mean is not None else {}
    simulated = None if mean is None else Row("spare", redundancy, 1000.0, (), found, 0, 1.0)
    return Choice(redundancy, by_theory, 0.9, 1000.0 + redundancy, 10, simulated)


ASKED = scenario({"groups": 200, "mtbf": 300.0})


def test_the_formulas_alone(capsys):
    found = ask(f"{FOUR} --no-simulation", capsys)
    assert found["r_star"] == 8 and found["argmin_simulated"] is None
    by_formula = {r: theory.time_to_train(200, r, 300.0, 60.0, 3600.0) for r in range(2, 13)}
    assert {one["redundancy"]: one["ttt_norm"] for one in found["choices"]} == pytest.approx(by_formula)
    assert found["argmin_theory"] == found["recommended"] == min(by_formula, key=by_formula.get)
    assert "nothing was simulated" in found["reason"]
    period = theory.checkpoint_period(60.0, theory.mu(200, found["recommended"]) * 300.0, 3600.0)
    assert found["checkpoint_period_s"] == pytest.approx(period)


def test_a_run_saves_as_often_as_its_plan_says(capsys, tmp_path):
    """From the formula, over the file and the environment of the workers, to the trainer's option."""
    plan = tmp_path / "plan.json"
    found = ask(
        "--groups 200,20 --mtbf 5m --restart 10m --save 30s --stack 10s --all-reduce 1s --no-simulation", capsys
    )
    plan.write_text(json.dumps(found))
    parser = argparse.ArgumentParser()
    arguments.add_flags(parser)
    words = ["--ft-hsdp-replicas", "20", "--ft-spare-plan", str(plan)]
    asked = flags.read(parser.parse_args([*words, "train.py"]), ruler, placement.read)
    of_twenty = found[1]
    assert asked.redundancy == of_twenty["recommended"] == 2
    period = theory.checkpoint_period(30.0, theory.mu(20, 2) * 300.0, 600.0)
    step_s = 10.0 * theory.stack_mean(20, 2) + 1.0
    assert flags.save_interval(asked.environment()) == round((period - 30.0) / step_s)
    assert flags.save_interval(asked.environment()) == of_twenty["checkpoint_interval_steps"]
    assert parse("--save-interval auto").checkpoint.save_interval == "auto"

    for more, said in (
        (["--ft-spare-redundancy", "3"], "recommends 2"),
        (["--ft-hsdp-replicas", "30"], "is for 20, 200 groups"),
        (["--ft-spare-plan", str(tmp_path / "none")], "cannot be read"),
        (["--ft-hsdp-lr-scaling", "sqrt"], "whole batch"),
    ):
        with pytest.raises(UserError, match=said):
            flags.read(parser.parse_args([*words, *more, "train.py"]), ruler, placement.read)
    alone = ask("--groups 200 --mtbf 300d --restart 1s --save 1s --no-simulation", capsys)
    plan.write_text(json.dumps(alone))
    with pytest.raises(UserError, match="checkpoints alone"):
        placement.read(plan, 200)
    assert launch(parse("--save-interval auto")) and "the run has no plan" in capsys.readouterr().err


def test_the_simulation_has_the_last_word(capsys):
    found = ask(f"{FOUR} --redundancy 2..12 --steps 2500 --seeds 2", capsys)
    assert found["r_star"] == 8
    assert 6 <= found["recommended"] <= found["argmin_simulated"] <= 12
    assert f"{found['recommended']}" and "simulated" in found["reason"]
    assert {"simulated_ttt_norm", "simulated_availability"} <= set(found["choices"][0])


def test_redundancies_are_tried_up_to_what_can_be_placed(capsys):
    found = ask("--groups 20 --mtbf 5m --restart 10m --save 1m --no-simulation", capsys)
    assert [one["redundancy"] for one in found["choices"]] == [2, 3, 4]


def test_the_best_is_recommended_where_it_is_clearly_so():
    found = optimum(ASKED, [of(7, 3.0, 3.5), of(8, 2.9, 3.2), of(9, 2.8, 3.0), of(10, 2.7, 3.1)], of(1, 9.0, 9.0))
    assert (found.argmin_theory, found.argmin_simulated, found.recommended) == (10, 9, 9)
    assert found.period_s == 1009.0
    assert "less than with any other" in found.reason
    assert "R = 8 of the rule of thumb (8) comes to 3.20" in found.reason
    assert "R = 10 of formula (7) comes to 3.10" in found.reason


def test_the_smallest_of_those_that_are_about_as_good_is_recommended():
    found = optimum(ASKED, [of(7, 3.0, 3.05), of(8, 2.9, 3.02), of(9, 2.8, 3.0)], of(1, 9.0, math.inf, None))
    assert (found.argmin_simulated, found.recommended) == (9, 8)
    assert "R = 9 comes to 3.00, less than 1 % better" in found.reason


def test_a_redundancy_that_never_trains_is_not_recommended():
    found = optimum(ASKED, [of(2, 2.0, math.inf, None), of(3, 2.9, 5.0)], of(1, 9.0, 9.0))
    assert (found.argmin_theory, found.recommended) == (2, 3)
    found = optimum(ASKED, [of(2, 2.0, math.inf, None), of(3, 2.9, math.inf, None)], of(1, 9.0, math.inf, None))
    assert (found.argmin_simulated, found.recommended) == (None, 2)
    assert "no simulated run with redundancy makes progress" in found.reason


def test_checkpoints_alone_are_recommended_where_no_redundancy_trains_faster(capsys):
    found = ask("--groups 64 --mtbf 60d --restart 10m --save 1m --no-simulation", capsys)
    assert found["checkpoints_alone"]["ttt_norm"] < 1.01 < 2 < min(one["ttt_norm"] for one in found["choices"])
    assert found["recommended"] == 1 and "checkpoints alone train in 1.00" in found["reason"]
    assert found["checkpoint_period_s"] == found["checkpoints_alone"]["checkpoint_period_s"]
    found = optimum(ASKED, [of(2, 2.0, 1.5), of(3, 2.9, 1.6)], of(1, 9.0, 1.4))
    assert found.recommended == 1 and "no redundancy is worth" in found.reason
    found = optimum(ASKED, [of(2, 2.0, math.inf, None)], of(1, 9.0, 1.4))
    assert found.recommended == 1 and "R = 2, in no end" in found.reason
    found = optimum(ASKED, [of(2, 2.0, 1.5)], of(1, 1.1, math.inf, None))
    assert found.recommended == 2 and "checkpoints alone come to no end" in found.reason


def test_the_table_says_what_to_do(capsys):
    words = "plan spare optimize --groups 24 --mtbf 5m --restart 10m --save 1m --steps 100 --seeds 2"
    assert cli.main(words.split()) == 0
    text = capsys.readouterr().out
    for word in (
        "rule of thumb (8): R = 5",
        "least of (7)",
        "recommended: R =",
        "a checkpoint every",
        "because",
        "none",
    ):
        assert word in text


def test_the_picture_is_drawn(tmp_path, capsys):
    picture = tmp_path / "p.png"
    words = f"plan spare optimize --groups 24 --mtbf 5m --steps 50 --seeds 2 --plot {picture}"
    assert cli.main(words.split()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--mtbf 5m", "the number of groups"),
        ("--groups 24", "the mean time between two failures is missing"),
        ("--groups 24 --mtbf=-5m", "--mtbf -5m"),
        ("--groups 24 --mtbf 5m --save 0", "--save 0"),
        ("--groups 24 --mtbf 5m --redundancy 9..4", "is empty"),
        ("--groups 24 --mtbf 5m --redundancy 2..12", "cannot be placed"),
        ("--groups 2 --mtbf 5m", "too few"),
        ("--groups 24,30 --mtbf 5m --plot p.png", "a picture shows a single number of groups"),
        ("--groups 24 --law none", "nothing to optimize"),
        ("--groups 24 --mtbf 5m --steps 5 --seeds 1 --plot {folder}/none/p.png", "the picture cannot be written"),
    ],
)
def test_input_that_cannot_work_is_refused_with_a_reason(words, part, tmp_path, capsys):
    assert cli.main(["plan", "spare", "optimize", *words.format(folder=tmp_path).split()]) == 2
    said = capsys.readouterr().err
    assert part in said and "fix:" in said
