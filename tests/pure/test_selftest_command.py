"""``ft selftest``: where it runs, and how it starts itself on the nodes of a Slurm job.

Its flags are in ``conversations/plan/selftest.txt``, its table and its values in ``conversations/values``.
"""

import argparse
from pathlib import Path

import pytest

from ft.base.errors import UserError
from ft.commands.selftest import _without_nodes, plan_of
from ft.lab.selftest.session import NodePlace, is_alone_in, srun
from ft.platform import slurm

FLAGS = {"gpus": None, "nodes": None, "node_rank": None, "rdzv_endpoint": None, "minutes": 10.0, "run_dir": None}
JOB = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
STEP = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_NODEID": "2"}


def plan(tmp_path, environment=None, **flags):
    given = argparse.Namespace(**{**FLAGS, "run_dir": str(tmp_path / "run"), "only": None, "plant": [], **flags})
    environment = environment or {}
    return plan_of(given, slurm.read(environment), environment)


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
