"""A host that computed wrongly in an earlier run is not used by the next one, on real hosts with names of their own."""

import subprocess
import sys

import pytest
from ft_runs import ROOT, flags
from nodes import Lab, why_not
from nodes.fleet import Fleet

from ft.platform import suspects

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())
COMMAND = [sys.executable, "-m", "ft", "run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1"]
STEPS = 6


def test_a_host_of_the_file_is_refused_for_training_and_starts_no_worker_as_a_standby(corpus, reference, tmp_path):
    path, wanted = tmp_path / "suspects.json", flags(corpus, "", STEPS)
    suspects.add(path, [suspects.Suspect("host1", None, "cpu", {"/runs/a": suspects.Counts(2, 60, 1)})])
    with Lab(2) as lab:
        endpoint = ["--rdzv-endpoint", f"{lab.hosts[0].address}:29400", "--run-dir", str(tmp_path / "refused")]
        command = [*COMMAND, *endpoint, "--suspects", str(path), "pretrain_gpt.py", *wanted.split()]
        how = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = lab.hosts[1].start(command, **how)
        said, _ = process.communicate(timeout=180)
        assert process.returncode == 2, said
        assert "this host, host1, is not used" in said and str(path) in said
        assert "wrong in 2 steps of 1 run, evicted 1 time" in said and not (tmp_path / "refused").exists()
        with Fleet(lab, tmp_path / "run", wanted, options=f"--suspects {path}") as fleet:
            done = fleet.wait()
    assert done.code == 0, done.explain()
    assert {event.node for event in done.named("worker_started")} == {"n0"}, done.explain()
    assert [event.node for event in done.named("device_unusable")] == ["n1"]
    assert "this host, host1, is not used" in done.output
    assert done.losses == reference(2, "", STEPS)
