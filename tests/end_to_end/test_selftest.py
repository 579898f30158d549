"""``ft selftest`` as a whole: in little time, with real recoveries, and on the nodes of a Slurm cluster."""

import json
import os
import subprocess
import sys

import pytest
import selftests
from ft_runs import ROOT, leftovers
from slurm.cluster import Cluster, reason_to_skip

CHECKED = "versions,storage,ports,clocks,groups"


@pytest.mark.long
def test_it_keeps_within_its_time_and_says_what_it_left_out(tmp_path):
    ended = selftests.selftest(tmp_path / "run", "--minutes", "0.7")
    rows, values = ended.rows(), ended.values
    assert ended.code == 0, (ended.output, ended.errors)
    assert values["seconds"] < 0.7 * 60 + 10
    assert rows["versions"]["outcome"] == rows["storage"]["outcome"] == "pass"
    assert rows["ports"]["outcome"] == rows["clocks"]["outcome"] == "skipped"
    assert "one node" in rows["ports"]["text"]
    assert rows["stall"]["outcome"] == "skipped" and "left out for time" in rows["stall"]["text"]
    assert json.loads((tmp_path / "run" / "selftest.json").read_text()) == values


@pytest.mark.long
def test_workers_are_replaced_with_the_same_losses(tmp_path):
    ended = selftests.selftest(tmp_path / "run", "--only", "training,kill,stall,stop")
    assert ended.code == 0, (ended.output, ended.errors)
    rows = ended.rows()
    assert [row["outcome"] for row in rows.values()] == ["pass"] * 4, ended.output
    for name in ("kill", "stall", "stop"):
        assert "losses equal, bit for bit" in rows[name]["text"] and rows[name]["measured"]["recovery_s"] > 0


@pytest.mark.long
def test_in_a_slurm_job_it_runs_on_every_node_by_itself(tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder, output = tmp_path / "run", tmp_path / "job.out"
    with Cluster(3) as cluster:
        command = f"{sys.executable} -m ft selftest --json --minutes 4 --only {CHECKED} --run-dir {folder}"
        sbatch = ["sbatch", "--parsable", "--nodes=3", f"--output={output}", f"--wrap={command}"]
        number = cluster.command(*sbatch, environment={"PYTHONPATH": str(ROOT)}, cwd=ROOT)
        ended = ("COMPLETED", "FAILED", "CANCELLED")
        cluster.wait_for(lambda: cluster.job(number)["JobState"] in ended, 280, "the end of the job")
        state = cluster.job(number)["JobState"]
    values = json.loads(output.read_text().splitlines()[-1])
    assert state == "COMPLETED" and values["passed"], output.read_text()
    assert sorted(values["nodes"]) == ["n1", "n2", "n3"]
    assert [row["outcome"] for row in values["checks"]] == ["pass"] * 5, output.read_text()
    assert all(len(row["nodes"]) == 3 for row in values["checks"])
    assert not leftovers(folder)


@pytest.mark.long
def test_the_script_for_a_machine_with_a_gpu_collects_its_results(tmp_path):
    short = {"MINUTES": "0.3", "WHOLE_S": "0", "TESTS_S": "0"}
    environ = {**os.environ, **short, "OUT": str(tmp_path), "PYTHON": sys.executable}
    script = "tools/experiments/gpu_session.sh"
    done = subprocess.run(["bash", script], cwd=ROOT, env=environ, capture_output=True, timeout=180, check=False)
    assert done.returncode == 0, done
    made = ["logs.tar.gz", "machine.txt", "selftest.json", "selftest.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == made
    assert json.loads((tmp_path / "selftest.json").read_text())["passed"]
    assert "torch" in (tmp_path / "machine.txt").read_text()


@pytest.mark.long
def test_the_probes_of_a_gpu_run_dry_on_a_cpu(tmp_path):
    out = tmp_path / "probes.jsonl"
    only = ["init-kill", "send-send", "host-cost", "gil", "register", "exit", "context", "step-end"]
    command = [sys.executable, "tools/experiments/gpu_probes.py", "--dry-run", "--out", str(out), "--only", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    first, *lines = map(json.loads, out.read_text().splitlines())
    assert first["card"] == "none: a dry run on the CPU" and [line["probe"] for line in lines] == only
    assert done.returncode == 0 and all(line["ended"] == "done" and line["found"] for line in lines), done
    found = {line["probe"]: line["found"] for line in lines}
    assert found["send-send"]["64 MiB alone"] != "hangs"
