"""The tables of the papers, as ``tools/experiments/papers.py`` redoes them."""

import importlib.util
from pathlib import Path

import pytest
from closed_forms import checkpoint_period, mu, spare_tables, stack_lower_bound

SCRIPT = Path(__file__).parents[2] / "tools/experiments/papers.py"
found = importlib.util.spec_from_file_location("papers", SCRIPT)
papers = importlib.util.module_from_spec(found)
found.loader.exec_module(papers)


@pytest.mark.parametrize("name", ["CheckFree", "CheckFree+"])
def test_the_fitted_cells_of_checkfree_are_hit_and_the_best_checkpoints_beat_it(name):
    paper = {"CheckFree": 405.9, "CheckFree+": 367.8}[name]
    ours = papers.checkfree_hours(name, 0.10, 20_000)
    assert ours == pytest.approx(paper, rel=0.01)
    assert papers.checkfree_hours("checkpoints, best interval", 0.10, 20_000) < ours


def test_spares_training_takes_the_time_of_table_2():
    for is_spare, redundancy, paper, available in ((False, 3, 6.07, 0.617), (True, 9, 2.92, 0.870)):
        time_to_train, up = papers.spare_training(200, redundancy, is_spare, 0)
        assert time_to_train == pytest.approx(paper, rel=0.1) and up == pytest.approx(available, abs=0.03)


@pytest.mark.parametrize(("name", "said"), [("deadpool", "section IV"), ("ft-hsdp", "12 replicas")])
def test_the_tables_are_printed(name, said, capsys):
    assert papers.main([name]) == 0
    assert said in capsys.readouterr().out


def test_the_theory_columns_of_spares_tables_4_to_6_to_the_printed_digit():
    rows = spare_tables()
    assert len(rows) == len({row[:2] for row in rows}) == 55
    for groups, redundancy, failures, _, stack, _ in rows:
        assert f"{mu(groups, redundancy):.1f}" == failures
        assert f"{stack_lower_bound(groups, redundancy):.2f}" == stack


def test_the_checkpoint_period_of_spare_is_where_availability_is_highest():
    save, failure, restart = 60.0, 30_000.0, 3600.0

    def availability(period):  # (2)
        return (1 - save / period) * failure / (failure + restart + period / 2)

    best = checkpoint_period(save, failure, restart)
    assert all(availability(best * factor) < availability(best) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))
