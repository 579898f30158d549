"""What somebody tries who has read the README: faults at random, and Ctrl-C."""

import os
import signal

import small_runs as runs
from agent_jobs import ROOT, Job
from ft_runs import flags

END_S = 120


def test_faults_at_random_end_no_run(tmp_path, jobs):
    """A thousand faults are planned, and those that come are survived."""
    faults = "kill@every=exponential(mean=10s):rank=random"
    words = ["--nproc-per-node", 4, "--standby", 1, "--seed", 7, "--inject", faults, "--run-dir", "run"]
    jobs.append(Job(tmp_path, [*words, ROOT / "examples" / "own_trainer.py", "--steps", 60], OMP_NUM_THREADS="1"))
    assert jobs[0].wait(180) == 0 and "step 60: loss" in jobs[0].text(), jobs[0].text()


def test_control_c_ends_a_training_run_and_all_that_it_has_started(tmp_path, jobs):
    """A terminal sends SIGINT to every process of the group. The step is finished, and a shell sees that."""
    training = flags(runs.make_corpus(tmp_path), steps=100000).split()
    words = ["--nproc-per-node", 2, "--standby", 1, "--run-dir", "run", ROOT / "pretrain_gpt.py", *training]
    jobs.append(job := Job(tmp_path, words, OMP_NUM_THREADS="1"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, "the first steps")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait(END_S) == 128 + signal.SIGINT, job.text()
    assert "SIGINT: workers are told to save and end" in job.text(), job.text()
