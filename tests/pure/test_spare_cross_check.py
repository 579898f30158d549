"""ft plan spare cross-check: the step-level simulation beside SimGrid, where that is installed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ft import cli
from ft.lab.simulate.spare import cross_check
from ft.lab.simulate.spare.clocks import Trace
from ft.lab.simulate.spare.cross_check import Comparison, recorded
from ft.lab.simulate.spare.run import RunTotals
from ft.lab.simulate.spare.scenario import read_file, scenario

SMALL = Path(__file__).parent.parent.parent / "examples/spare/small.toml"


NO_SIMGRID = "SimGrid is not installed (pip install '.[simgrid]', which builds it)"


@pytest.mark.skipif(not cross_check.installed(), reason=NO_SIMGRID)
@pytest.mark.parametrize("clocks", ["extend", "replace", "ignore"])
def test_simgrid_sees_the_same_events_at_the_same_time(clocks, capsys):
    words = f"plan spare cross-check {SMALL} --steps 40 --seeds 1 --clocks {clocks} --json"
    assert cli.main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["scheme"] for one in found] == ["spare", "replication", "checkpoint"]
    assert all(one["agrees"] and one["simgrid"]["failures"] > 0 for one in found)


def test_without_simgrid_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(cross_check, "installed", lambda: False)
    assert cli.main(["plan", "spare", "cross-check", str(SMALL)]) == 2
    said = capsys.readouterr().err
    assert "SimGrid is not installed" in said and "[simgrid]" in said


def test_a_scenario_that_is_not_small_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(cross_check, "installed", lambda: True)
    assert cli.main(["plan", "spare", "cross-check", str(SMALL.parent / "table1_n600.toml")]) == 2
    assert "small scenarios" in capsys.readouterr().err


def test_both_are_given_the_same_failures():
    asked = scenario(read_file(SMALL))
    law = recorded(asked, 3)
    assert isinstance(law, Trace)
    same = recorded(asked, 3)
    rng, groups = np.random.default_rng(0), np.arange(24)
    first, again = (each.after(np.zeros(24), groups, rng) for each in (law, same))
    assert np.array_equal(first, again) and np.isfinite(first).all()
    assert recorded(replace(asked, mtbf_s=float("inf"), law="none"), 3) is not None


def test_answers_that_differ_do_not_agree():
    seen = RunTotals(total_s=1000.0, steps=10, failures=3)
    assert Comparison(24, "spare", 4, 0, seen, replace(seen, total_s=1000.01)).agrees
    assert not Comparison(24, "spare", 4, 0, seen, replace(seen, total_s=1001.0)).agrees
    assert not Comparison(24, "spare", 4, 0, seen, replace(seen, failures=2)).agrees


def test_the_first_line_says_what_both_leave_out(monkeypatch, capsys):
    monkeypatch.setattr("ft.lab.plan.spare.cross_check.compare", lambda asked: [])
    assert cli.main(["plan", "spare", "cross-check", str(SMALL)]) == 0
    assert capsys.readouterr().out.startswith("Left out: groups that return before a wipe-out;")
