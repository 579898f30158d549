"""``ft plan disruption``: the paper's own examples, known formulas, and input that cannot work."""

import json
import math
import random

import pytest

from ft import cli
from ft.base import events
from ft.base.errors import UserError
from ft.lab.interval import daly, in_steps, young
from ft.lab.plan.disruption.measured import measured
from ft.lab.plan.disruption.model import (
    Cluster,
    HotSwap,
    Training,
    missing,
    mttf,
    of_hot_swap,
    of_restart,
    standbys_for,
)
from ft.lab.plan.disruption.replay import Empirical, Uniform
from ft.record.run import load

FT_HSDP = "--gpus 100000 --mttf 18m --step-time 20s --checkpoint-interval 100 --checkpoint-cost 0 --restart-time 10m"
"""Section IV quotes FT-HSDP: a failure every 18 minutes, a stall of 10, checkpoints every 100 steps of 20 s."""

DEADPOOL = (
    "--gpus 256 --gpus-per-node 4 --mttf 1d --step-time 2.08s --checkpoint-interval 5000 --checkpoint-cost 8.9s "
    "--restart-time 150s --hot-swap-time 32.6s,29.8s --interrupted 0"
)
"""Section VII-C: 64 nodes of 4 GPUs, 100,000 steps in 2.41 days, what hot-swaps and restarts took."""


def plan(words: str, capsys) -> dict:
    assert cli.main(["plan", "disruption", *words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- the paper's examples ---------------------------------------------------------------------------------------------


def test_the_replay_of_section_iv_is_16_7_minutes(capsys):
    found = plan(f"{FT_HSDP} --hot-swap-time 30s", capsys)
    assert found["ways"]["restart"]["per_failure_s"]["replay"] / 60 == pytest.approx(16.7, abs=0.05)


def test_by_the_formula_without_the_interrupted_step_it_is_half_a_step_less(capsys):
    found = plan(f"{FT_HSDP} --hot-swap-time 30s --interrupted 0", capsys)
    assert found["ways"]["restart"]["per_failure_s"]["replay"] == pytest.approx((100 - 1) / 2 * 20)


def test_with_a_restart_of_10_minutes_every_18_the_run_gets_on_less_than_half_of_the_time(capsys):
    found = plan(f"{FT_HSDP} --hot-swap-time 30s", capsys)
    assert found["ways"]["restart"]["effective_training_time"] == pytest.approx(18 / (18 + 10 + 16.67), abs=1e-3)
    assert found["ways"]["hot_swap"]["effective_training_time"] > 0.95


def test_the_failures_of_section_vii_c_as_the_text_states_them(capsys):
    """They came 18 and 2366 steps after a checkpoint: by its own formula that is 1.2 %, not the 5.3 % it prints."""
    found = plan(f"{DEADPOOL} --failure-steps 18,2366", capsys)
    restart, swap = found["ways"]["restart"]["recovery_s"], found["ways"]["hot_swap"]["recovery_s"]
    assert 2 * swap == pytest.approx(32.6 + 29.8)
    assert 2 * restart == pytest.approx(2 * 150 + (18 + 2366) * 2.08)
    assert found["recovery_ratio"] == pytest.approx(swap / restart) == pytest.approx(0.01187, abs=1e-5)


def test_the_5_3_percent_of_section_vii_c_are_420_steps_of_replay(capsys):
    """What the two percentages leave room for: both are met by 418 to 421 replayed steps, and by no other number."""

    def ratio(steps: int) -> float:
        return (32.6 + 29.8) / (2 * 150 + steps * 2.08)

    fits = [
        steps for steps in range(5000) if round(100 * ratio(steps), 1) == 5.3 and round(1 / ratio(steps), 1) == 18.8
    ]
    assert fits and all(415 <= steps <= 425 for steps in fits)
    second = fits[len(fits) // 2] - 18
    found = plan(f"{DEADPOOL} --failure-steps 18,{second}", capsys)
    assert round(100 * found["recovery_ratio"], 1) == 5.3
    assert round(1 / found["recovery_ratio"], 1) == 18.8


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_uniform_replay_is_the_mean_over_all_steps_of_an_interval():
    for interval in (1, 2, 7, 100):
        assert Uniform().expected(interval) == sum(range(interval)) / interval
        assert Empirical(range(3 * interval)).expected(interval) == pytest.approx(Uniform().expected(interval))


def test_empirical_replay_counts_from_the_last_checkpoint():
    assert Empirical([18, 2366]).expected(5000) == (18 + 2366) / 2
    assert Empirical([5018, 12366]).expected(5000) == (18 + 2366) / 2


def test_youngs_interval_costs_least_in_the_model():
    cluster = Cluster(gpus=1024, gpus_per_node=8, mttf_s=7200.0)
    best = in_steps(young(30.0, cluster.mttf_s), 2.0)

    def cost(interval):
        return of_restart(cluster, Training(2.0, interval, 30.0, 300.0), Uniform()).total

    assert best == min(range(1, 2000), key=cost)


def test_dalys_interval_is_youngs_for_cheap_checkpoints_and_the_mttf_for_dear_ones():
    assert daly(1.0, 1e8) == pytest.approx(young(1.0, 1e8), rel=1e-3)
    assert daly(3000.0, 1000.0) == 1000.0


def test_rates_of_failing_parts_add_up():
    assert mttf(1000, 8, 1e6, None) == pytest.approx(1000.0)
    assert mttf(1000, 8, 1e6, 1.25e5) == pytest.approx(500.0)


def test_cost_per_day_and_efficiency_follow_from_the_cost_of_a_failure():
    cost = of_restart(Cluster(8, 8, 1800.0), Training(1.0, 11, 0.0, 195.0, interrupted=0.0), Uniform())
    assert cost.total == 200.0
    assert cost.per_day(1800.0) == 200.0 * 48
    assert cost.efficiency(1800.0) == 0.9


def test_a_hot_swap_that_finds_no_standby_costs_a_restart():
    swap = HotSwap({"detect": 1.0, "rebuild": 5.0})
    training = Training(2.0, 100, 0.0, 300.0)
    none = of_hot_swap(Cluster(64, 8, 3600.0, standby_nodes=0), training, Uniform(), swap)
    restart = of_restart(Cluster(64, 8, 3600.0), training, Uniform())
    assert none.recovery == restart.recovery + 1.0
    some = of_hot_swap(Cluster(64, 8, 3600.0, 1, repair_s=1800.0), training, Uniform(), swap)
    assert 6.0 < some.recovery < none.recovery


def test_protection_is_paid_in_every_step_between_two_failures():
    cost = of_hot_swap(Cluster(8, 8, 1000.0), Training(2.0, 0, 9.0, 0.0), Uniform(), HotSwap({}, protect_s=0.01))
    assert cost.overhead == pytest.approx(5.0)


def test_standbys_run_out_as_often_as_in_a_simulated_queue():
    seed = 5
    print(f"seed {seed}")
    rng, now, away, missed, failures = random.Random(seed), 0.0, [], 0, 40_000
    for _ in range(failures):
        now += rng.expovariate(1.0)
        away = [back for back in away if back > now]
        missed += len(away) >= 3
        away.append(now + 1.5)
    assert missing(3, 1.5) == pytest.approx(missed / failures, abs=0.01)
    assert missing(standbys_for(1e-3, 1.5), 1.5) <= 1e-3 < missing(standbys_for(1e-3, 1.5) - 1, 1.5)


@pytest.mark.parametrize("in_repair", [1e-9, 1.0, 50.0, 2000.0])
def test_the_probability_of_a_missing_standby_falls_with_their_number(in_repair):
    found = [missing(n, in_repair) for n in (0, 1, 10, 100, 3000)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 1.0 and found[-1] < 1e-6
    assert not any(math.isnan(p) for p in found)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_table_names_every_part_and_its_money(capsys):
    words = f"plan disruption {FT_HSDP} --detect 10s --rebuild 30s --restore 5s --price 2.5 --steps 1000 --standbys 40"
    assert cli.main([*words.split(), "--repair-time", "6h"]) == 0
    text = capsys.readouterr().out
    for word in (
        "overhead",
        "detect",
        "rebuild",
        "restore",
        "restart",
        "replay",
        "16 min 40 s",
        "$",
        "(Young)",
        "days",
    ):
        assert word in text
    assert "finds no standby with probability" in text


def test_the_picture_is_drawn(tmp_path, capsys):
    picture = tmp_path / "p.png"
    words = f"plan disruption {DEADPOOL} --failure-steps 18,2366 --plot {picture}"
    assert cli.main(words.split()) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def a_run(folder, swaps: int):
    """A run of which only what the cost model reads is there: steps of 0.5 s, hot-swaps of 0.1 + 0.2 + 0.3 s."""
    log = events.EventLog(folder / "events.jsonl")

    def say(at: float, name: str, **values):
        log.write(events.observed(name, {"wall": at, "monotonic": at, **values}))

    say(0.0, events.RUN_STARTED, command=["x"], world_size=2)
    say(1.0, events.EPOCH_OPENED, epoch=0, seats={"0": "w0", "1": "w1"}, joiners=[])
    for i in range(swaps):
        at, epoch = 10.0 * (i + 1), i
        where = {"epoch": epoch, "rank": 1, "worker": f"w{i + 1}", "node": "n0", "step": 5}
        say(at, events.FAULT_DETECTED, **where, category="c", action="replace", reason="r", signal="s")
        say(at, events.EPOCH_CLOSED, epoch=epoch, reason="r")
        say(at + 0.05, events.RELEASED, epoch=epoch)
        say(at + 0.06, events.EPOCH_OPENED, epoch=epoch + 1, seats={"0": "w0", "1": f"w{i + 2}"}, joiners=[1])
        say(at + 0.1, events.REPAIR_ORDERED, epoch=epoch + 1, step=5)
        groups = {"rebuilt": 1, "kept": 0, "deferred": 0, "seconds": 0.2}
        say(at + 0.55, events.GROUPS_REBUILT, epoch=epoch + 1, **groups)
        say(at + 0.55, events.STATE_RESTORED, epoch=epoch + 1, step=5, sources={}, seconds=0.25)
        say(at + 0.6, events.RESUMED, epoch=epoch + 1, step=5)
    say(99.0, events.FINISHED, step=9)
    log.close()
    steps = [json.dumps({"step": step, "step_time_s": 0.5}) for step in range(1, 10)]
    (folder / "metrics.jsonl").write_text("\n".join(steps) + "\n")
    return folder


def test_times_are_taken_from_a_run(tmp_path, capsys):
    times = measured(load(a_run(tmp_path, swaps=2)))
    assert (times.step_s, times.hot_swaps, times.restart_s) == (0.5, 2, None)
    assert times.parts == pytest.approx({"detect": 0.1, "rebuild": 0.2, "restore": 0.3})
    words = "--gpus 8 --mttf 1h --checkpoint-interval 100 --checkpoint-cost 1s --restart-time 60s --rebuild 9s"
    found = plan(f"{words} --from-run {tmp_path}", capsys)
    parts = found["ways"]["hot_swap"]["per_failure_s"]
    assert parts["detect"] == pytest.approx(0.1)
    assert parts["rebuild"] == 9.0  # what is given counts more than what was measured


def test_a_run_without_a_hot_swap_has_no_times(tmp_path):
    with pytest.raises(UserError, match="contains no completed hot-swap: it has 0 recoveries"):
        measured(load(a_run(tmp_path, swaps=0)))


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ("--gpus 100", "not a multiple of --gpus-per-node"),
        ("--mtbf-gpu 50d", "--mttf cannot be combined with --mtbf-gpu"),
        ("--detect 3s", "--hot-swap-time already includes --detect"),
        ("--failure-steps 18,x", "neither steps nor a readable file"),
        ("--failure-steps {folder}/empty", "is empty"),
        ("--failure-steps {folder}/words", "contains 'twelve'"),
        ("--from-run {folder}/nowhere", "is no folder"),
        ("--from-run {folder}", "contains no run"),
        ("--standbys 0 --fallback-interval 0", "with probability 1"),
        ("--repair-time 900d", "nodes would be away at any time, and there are 64"),
        ("--plot {folder}/none/p.png", "the picture cannot be written"),
    ],
)
def test_input_that_cannot_work_is_refused_with_a_reason(extra, part, tmp_path, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "words").write_text("3\ntwelve\n")
    words = f"plan disruption {DEADPOOL} {extra.format(folder=tmp_path)}"
    if "--gpus 100" in extra:
        words = words.replace("--gpus-per-node 4", "--gpus-per-node 8")
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert part in said and "fix:" in said


@pytest.mark.parametrize(
    "words",
    [
        "--mttf -3",
        "--mttf nan",
        "--step-time 0",
        "--gpus 0",
        "--checkpoint-interval 1.5",
        "--interrupted 2",
        "--price x",
    ],
)
def test_a_flag_that_makes_no_sense_is_refused_by_name(words, capsys):
    assert cli.main(["plan", "disruption", *DEADPOOL.split(), *words.split()]) == 2
    assert f"error: {words.split()[0]}: " in capsys.readouterr().err


def test_what_is_missing_is_named(capsys):
    words = FT_HSDP.replace("--mttf 18m", "").split()
    assert cli.main(["plan", "disruption", *words, "--hot-swap-time", "30s"]) == 2
    assert "the rate of failures is missing" in capsys.readouterr().err
    assert cli.main(["plan", "disruption", *FT_HSDP.split(), "--detect", "1s"]) == 2
    assert "--rebuild is missing" in capsys.readouterr().err
