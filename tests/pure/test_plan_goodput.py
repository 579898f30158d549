"""The model of a run under failures against exact values. Scenarios: ``conversations/values/plan.txt``."""

import dataclasses
import math

import numpy as np
import pytest
from closed_forms import asked, deadpool, ft_hsdp, mu, overlapping, trials

from ft.lab.plan.goodput import engine, model, scenario
from ft.lab.plan.goodput.model import CHECKPOINTS, ProtectionChoice
from ft.protection.table import HOT_SWAP, REPLICAS, STACKS, STAGES, SWAPPED
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

BASE = "--gpus 64 --gpu-mtbf 320h --step-time 1s --save-time 60s --restart-time 600s --repair-time 0 --days 30"
POINTS = 0.005
ALONE = ProtectionChoice((CHECKPOINTS,))


def effective(words: str, protection: ProtectionChoice, standbys: int = 0, interval: float = 1000) -> model.Row:
    number = 40_000 if engine.player()[0] == "numba" else 8000
    return model.simulate(asked(words), protection, standbys, interval, number)


@pytest.mark.parametrize(("hours", "steps"), [(320, 1000), (32, 500), (8, 300)])
def test_checkpoints_alone_are_useful_as_dalys_exact_formula_says(hours, steps):
    row = effective(BASE.replace("320h", f"{hours}h"), ALONE, interval=steps)
    assert row.effective == pytest.approx(model.daly(steps, 60.0, 600.0, hours * 3600 / 64), abs=POINTS)


@pytest.mark.parametrize("standbys", [0, 2, 5])
def test_a_job_waits_for_nodes_as_in_a_chain_of_births_and_deaths(standbys):
    totals = effective("--gpus 64 --step-time 1s --days 30 --gpu-mtbf 320h --save-time 0 --restart-time 0 "
                       "--repair-time 8h", ALONE, standbys, 1).totals  # fmt: skip
    exact = model.waiting(8, standbys, 40 * 3600.0, 8 * 3600.0)
    assert totals["waited"] / totals["seconds"] == pytest.approx(exact, abs=POINTS)


@pytest.mark.parametrize("hours", [40, 160])
def test_replicas_whose_failures_overlap_train_as_the_exact_formula_says(hours):
    row = effective(BASE.replace("320h", f"{hours}h").replace("1s", "10ms"), ProtectionChoice((REPLICAS,), 8), 0, 1e12)
    assert row.effective == pytest.approx(overlapping(hours * 3600 / 64, 8, 180.0, 600.0), abs=POINTS)


@pytest.mark.parametrize(
    ("protection", "stall", "interval"), [(ALONE, 600, 1), (ProtectionChoice((REPLICAS,), 12), 180, 1e12)]
)
def test_periodic_failures_cost_what_section_6_1_of_ft_hsdp_says(protection, stall, interval):
    words = (
        "--gpus 96 --gpu-mtbf 28.8h --law periodic --step-time 10ms --save-time 0 --restart-time 10m --repair-time 0"
    )
    exact = ft_hsdp(1080, protection.units, stall, 600)
    assert effective(words, protection, 0, interval).effective == pytest.approx(exact, abs=POINTS)


def test_hot_swap_costs_what_section_iv_of_deadpool_says():
    row = effective(f"{BASE} --swap-time 30s", ProtectionChoice((HOT_SWAP,), copies=1), 8, 100_000)
    assert row.effective == pytest.approx(deadpool(18000.0, 30.5 + 60.0 * 18000 / 100_000), abs=POINTS)


@pytest.mark.parametrize("redundancy", [2, 4])
def test_spares_groups_endure_about_as_many_failures_as_its_formula_says(redundancy):
    words = "--gpus 1600 --gpu-mtbf 100d --step-time 1s --save-time 0 --restart-time 0 --repair-time 0"
    totals = effective(words, ProtectionChoice((REPLICAS, STACKS), 200, 0, redundancy, returns=False), 0, 1).totals
    assert totals["units lost"] / totals["losses"] == pytest.approx(mu(200, redundancy), rel=0.06)


@pytest.mark.parametrize("law", scenario.REPAIRS)
def test_the_law_of_repairs_does_not_matter_for_waits(law):
    words = BASE.replace("--repair-time 0", f"--repair-time 8h --repair-law {law}").replace("s-time 600s", "s-time 0")
    row = effective(words, ProtectionChoice((CHECKPOINTS,)), 2, 1)
    waited = row.totals["waited"] / row.totals["seconds"]
    assert waited == pytest.approx(model.waiting(8, 2, 40 * 3600, 8 * 3600), abs=POINTS)


@pytest.mark.parametrize(("groups", "redundancy"), [(16, 2), (64, 3)])
def test_spares_groups_endure_what_its_controller_says(groups, redundancy):
    words = f"--gpus {8 * groups} --gpu-mtbf 100d --step-time 1s --save-time 0 --restart-time 0 --repair-time 0"
    row = effective(words, ProtectionChoice((REPLICAS, STACKS), groups, 0, redundancy, returns=False), interval=1)
    endured = trials(Placement(groups, ruler(groups, redundancy)), 2000, 1)[:, 0].mean()
    assert row.totals["units lost"] / row.totals["losses"] == pytest.approx(endured, rel=0.03)


def test_two_copies_of_a_state_are_lost_only_with_both_of_their_nodes():
    """A copy is lost if its holder, one of the 7 other nodes, fails within the recovery."""
    row = effective(BASE + " --swap-time 30s", ProtectionChoice((HOT_SWAP,), copies=1), 8, 100_000)
    assert row.totals["restarts"] < 3 * row.totals["swaps"] * 30 / 18_000 / 7


def test_checkfree_rebuilds_the_ends_with_swapped_stages_only():
    """8 nodes are 8 stages: with one failure at a time, two of eight losses are of the first or the last stage."""
    words = BASE.replace("64 ", "64 --stages 8 ") + " --neighbour-time 1ms"
    middle = effective(words, ProtectionChoice((HOT_SWAP, STAGES)), 8, 1000).totals
    plus = effective(words, ProtectionChoice((HOT_SWAP, STAGES, SWAPPED)), 8, 1000).totals
    assert middle["restarts"] / middle["failures"] == pytest.approx(2 / 8, abs=0.02)
    assert plus["restarts"] < 0.01 * plus["failures"]


def test_interpreted_and_compiled_give_the_same():
    if engine.player()[0] != "numba":
        pytest.skip("numba is not installed")
    given = asked(
        BASE.replace("--repair-time 0", "--repair-time 4h --bad-spares 0.2 --rack-mtbf 50d --nodes-per-rack 4")
    )
    for protection in (ProtectionChoice((HOT_SWAP,), copies=1), ProtectionChoice((REPLICAS,), 4)):
        found = []
        for play in (engine.play, engine.player()[1]):
            happen = model.events(given, 2, 500)
            state, out = engine.begin(protection.units, given.nodes, 2, 0), np.zeros((1, 35))
            play(model.options(given, protection, 500), happen, state, happen.at[-2:-1], out)
            found.append(out)
        assert np.array_equal(*found)


def test_failures_also_strike_while_a_run_waits_restarts_and_saves():
    row = effective(BASE.replace("320h", "4h"), ProtectionChoice((CHECKPOINTS,)), interval=100)
    assert row.totals["failures"] > 1.5 * row.totals["restarts"]


def test_software_failures_need_no_standby():
    words = BASE.replace("--gpu-mtbf 320h", "--software-mtbf 5h")
    assert effective(words, ProtectionChoice((HOT_SWAP,), copies=1)).totals["restarts"] == 0
    assert effective(words, ProtectionChoice((CHECKPOINTS,))).totals["restarts"] > 0


def test_a_rack_that_takes_nodes_of_two_replicas_leaves_the_standby_to_the_one_that_lacks_fewer():
    """Nodes 3 to 5 fail: two of the first replica's five, and one of the second's."""
    given = asked(BASE.replace("64", "80"))
    happen = engine.Events(np.array([10.0, engine.NEVER]), np.array([3, 0]), np.array([3, 0]), np.array([3600.0, 0.0]),
                           np.zeros(9))  # fmt: skip
    state = engine.begin(2, 10, 1, 0)
    engine.play(
        model.options(given, ProtectionChoice((REPLICAS,), 2), 100), happen, state, np.array([20.0]), np.zeros((1, 35))
    )
    assert state.missing.tolist() == [2, 0] and state.ready.tolist() == [engine.NEVER, 610.0]


def test_a_rack_takes_a_state_and_its_copies_unless_they_are_in_another():
    words = BASE.replace("--gpu-mtbf 320h", "--rack-mtbf 10d --nodes-per-rack 4")
    apart = effective(words, ProtectionChoice((HOT_SWAP,), copies=1), 8)
    assert apart.totals["swaps"] > 0
    assert apart.totals["restarts"] < 0.1 * apart.totals["swaps"]


def test_the_best_interval_minimises_dalys_exact_formula():
    def cost(x: float) -> float:
        return (math.exp((x + 60) / 1800) - 1) / x

    best = model.best_interval(60.0, 1800.0, 1.0)
    assert cost(best) <= min(cost(best - 5), cost(best + 5))


@pytest.mark.parametrize(("restart", "best"), [(600, 2940), (1200, 2340)])
def test_the_best_interval_of_periodic_failures_is_searched(restart, best):
    """Of the time between two failures and after a restart, one save right before the next failure takes the least."""
    given = asked(f"--gpus 8 --gpu-mtbf 8h --law periodic --step-time 1s --save-time 60s --restart-time {restart}s "
                  "--repair-time 0 --failures 2000 --spares 0")  # fmt: skip
    row = model.final(given, model.best(given, [ProtectionChoice((CHECKPOINTS,))]))
    assert row.interval == pytest.approx(best, abs=15) and row.effective == pytest.approx(best / 3600, abs=POINTS)


def test_every_combination_is_one_that_the_table_allows_and_the_ladder_answers():
    every = list(model.allowed())
    assert () in every
    assert all(REPLICAS in names for names in every if STACKS in names)
    assert model.follows((HOT_SWAP,))["a node is lost, a standby is there"] == "standby"
    assert model.follows(())["a node is lost, a standby is there"] == "checkpoint"


def test_a_row_says_what_it_costs():
    row = effective(BASE, ProtectionChoice((HOT_SWAP,), copies=1), 2)
    given = asked(f"{BASE} --price-per-gpu-hour 2 --params 70B")
    assert row.paid == pytest.approx(1.25 / row.effective)
    assert row.memory(given) == pytest.approx(2 * 2 * 12 * 70e9 / 8)
    assert row.money(given) == pytest.approx(2 * 24 * 80 * 30 / row.effective)
    assert dataclasses.replace(row, protection=ProtectionChoice((CHECKPOINTS,))).memory(given) == 0


def test_a_range_is_that_of_runs_of_the_length_asked_about_however_long_the_simulation():
    words = BASE.replace("--days 30", "--days 1")
    few, many = (model.simulate(asked(words), ProtectionChoice((CHECKPOINTS,)), 0, 1000, n) for n in (4000, 40_000))
    assert (few.low, few.high) == pytest.approx((many.low, many.high), abs=0.02)


def test_a_wait_for_nodes_that_is_known_exactly_needs_no_long_simulation():
    """The mean of 4,000 failures would be off by points: it covers few repairs."""
    words = "--gpus 1024 --gpu-mtbf 50000h --step-time 10s --save-time 0 --restart-time 0 --repair-time 14d"
    for standbys in (4, 8):
        row = effective(words, ProtectionChoice((CHECKPOINTS,)), standbys, 1)
        assert row.effective == pytest.approx(1 - model.waiting(128, standbys, 6250 * 3600, 14 * 86400), abs=POINTS)
    assert model.waits(asked(f"{words} --rack-mtbf 90d --nodes-per-rack 8"), 4) is None


def test_racks_fail_alike_even_if_the_last_one_has_fewer_nodes():
    happen = model.events(asked(f"{BASE} --rack-mtbf 1h --nodes-per-rack 6 --gpu-mtbf 1000d"), 0, 20_000)
    assert np.mean(happen.node[happen.taken == 6] // 6) == pytest.approx(0.5, abs=0.02)
