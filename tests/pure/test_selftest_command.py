"""``ft selftest``: its flags, its table and its JSON values, and how it starts itself on the nodes of a Slurm job."""

import argparse
import json
from pathlib import Path

import pytest

from ft.base.errors import UserError
from ft.commands.selftest import _without_nodes, plan_of
from ft.lab.selftest.session import NodePlace, SelfTestOutcome, as_text, as_values, is_alone_in, srun
from ft.lab.selftest.table import CHECKS, FAIL, PASS, SKIPPED, Result, chosen, together
from ft.platform import slurm

FLAGS = {"gpus": None, "nodes": None, "node_rank": None, "rdzv_endpoint": None, "minutes": 10.0, "run_dir": None}
JOB = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_NODEID": "2"}


def plan(tmp_path, environment=None, **flags):
    given = argparse.Namespace(**{**FLAGS, "run_dir": str(tmp_path / "run"), "only": None, "plant": [], **flags})
    environment = environment or {}
    return plan_of(given, slurm.read(environment), environment)


def test_the_checks_have_names_of_their_own_and_fit_into_their_limits():
    assert len({check.name for check in CHECKS}) == len(CHECKS) == 19
    assert all(0 < check.needs_s < check.limit_s for check in CHECKS)
    assert sum(check.needs_s for check in CHECKS) < 600, "they do not fit into the default of --minutes"


def test_checks_are_chosen_in_the_order_of_importance():
    assert [check.name for check in chosen(["ring,kill", "versions"], "--only")] == ["versions", "kill", "ring"]
    with pytest.raises(UserError, match="there is no check 'rings'"):
        chosen(["rings"], "--only")


def test_the_place_is_that_of_the_flags_or_of_slurm(tmp_path):
    assert plan(tmp_path).place == NodePlace()
    assert plan(tmp_path, nodes=3, node_rank=1, rdzv_endpoint="n1").place == NodePlace(1, 3, "n1", 29400)
    found = plan(tmp_path, STEP, run_dir=None)
    assert found.place == NodePlace(2, 3, "n1", 29477)
    assert found.run_dir == Path("runs/selftest-77.0")
    with pytest.raises(UserError, match="this Slurm step has 3"):
        plan(tmp_path, STEP, nodes=2)


def test_in_a_script_or_shell_of_several_nodes_it_starts_itself_on_all_of_them():
    assert is_alone_in(slurm.read(JOB), JOB)
    assert not is_alone_in(slurm.read(STEP), STEP) and not is_alone_in(None, {})
    shell = {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}
    assert is_alone_in(slurm.read(shell), shell)
    words = _without_nodes(["selftest", "--nodes", "2", "--json", "--nodes=2", "--only", "ring"])
    assert words == ["selftest", "--json", "--only", "ring"]
    assert srun(None, JOB, words)[:3] == ["srun", "--nodes=3", "--ntasks=3"]
    assert srun(2, JOB, words)[:2] == ["srun", "--nodes=2"]


def test_a_check_fails_if_it_fails_on_one_node():
    good, bad = Result(PASS, "well", seconds=1.0, node="a"), Result(FAIL, "ill", "cure it", seconds=3.0, node="b")
    none = Result(SKIPPED, "no GPU", node="c")
    merged = together([good, bad, none])
    assert (merged.outcome, merged.text, merged.fix, merged.seconds) == (FAIL, "b: ill", "cure it", 3.0)
    assert together([none, good]).outcome == PASS
    assert "passed on 2 nodes" in together([good, good]).text
    assert together([none, none]).outcome == SKIPPED


def outcome() -> SelfTestOutcome:
    rows = [
        (CHECKS[0], [Result(PASS, "torch 2.13", measured={"torch": "2.13"}, seconds=2.0, node="a")]),
        (CHECKS[1], [Result(FAIL, "cannot be\nwritten", "give --run-dir", seconds=0.2, node="a")]),
        (CHECKS[2], [Result(SKIPPED, "this is one node")]),
    ]
    return SelfTestOutcome(rows, ["a"], "runs/selftest", 2.5)


def test_the_table_says_what_to_do_about_each_failure():
    text = as_text(outcome())
    assert "versions  pass     2.00 s  torch 2.13" in text and "cannot be written" in text
    assert "storage shows: the run folder" in text and "what to do: give --run-dir" in text
    assert "versions shows" not in text
    assert text.splitlines()[-1] == "1 passed, 1 failed, 1 skipped; 1 node, 2.50 s; logs: runs/selftest"
    assert not outcome().passed


def test_the_json_values_hold_every_result():
    values = json.loads(json.dumps(as_values(outcome())))
    assert (values["format"], values["passed"], values["nodes"]) == (1, False, ["a"])
    first, second, _ = values["checks"]
    assert first["name"] == "versions" and first["measured"] == {"torch": "2.13"} and first["fix"] is None
    assert second["outcome"] == "fail" and second["fix"] == "give --run-dir" and second["nodes"][0]["node"] == "a"
