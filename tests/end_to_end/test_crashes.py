"""The first cause of real crashes: what ``ft run`` prints at its end, and what ``ft diagnose crash`` says later."""

import json

import pytest
from agent_jobs import Job, ft

SCRIPT = """
import os, signal, sys, time, traceback
import torch, torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()


def check_batch(step):
    if how == "one" and rank == 2 and step == 3:
        raise ValueError(f"sample 17 of step {step} has no tokens")
    if how == "signal" and rank == 2 and step == 3:
        os.kill(os.getpid(), signal.SIGSEGV)


def train():
    for step in range(1, 6):
        check_batch(step)
        dist.all_reduce(torch.ones(1))


try:
    train()
except ValueError:
    traceback.print_exc()
    dist.destroy_process_group()  # the others lose their connections now, and end long before this process
    time.sleep(100)
"""


@pytest.fixture
def crashed(tmp_path, jobs):
    """Return a function that runs the script to its end: what the terminal showed, and what the command says."""

    def run(how: str) -> tuple[str, dict]:
        (tmp_path / "train.py").write_text(SCRIPT)
        flags = ["--nproc-per-node", 4, "--run-dir", "run", "--preload", "torch"]
        jobs.append(job := Job(tmp_path, [*flags, "train.py", how], OMP_NUM_THREADS="1"))
        assert job.wait() not in (0, 2), job.text()
        done = ft("diagnose", "crash", "--json", tmp_path / "run")
        assert done.returncode == 1, done.stdout
        return job.text(), json.loads(done.stdout)[0]

    return run


def test_the_rank_that_raised_is_the_cause_although_the_others_end_first(crashed):
    text, found = crashed("one")
    assert found["first_cause"]["error"] == "ValueError: sample 17 of step 3 has no tokens"
    assert found["first_cause"]["ranks"] == [2] and "in check_batch" in found["first_cause"]["trace"]
    assert not found["other_causes"] and "lost connection" in {one["class"] for one in found["consequences"]}
    assert "ft: first cause: ValueError: sample 17" in text
    assert text.count("raise ValueError") == 1, "the stack is printed once"


def test_a_rank_that_a_signal_killed_is_the_cause(crashed):
    text, found = crashed("signal")
    assert (found["first_cause"]["error"], found["first_cause"]["ranks"]) == ("killed by SIGSEGV", [2])
    assert "check_batch" in found["first_cause"]["trace"]
    assert not found["other_causes"] and found["consequences"]
    assert "ft: first cause: killed by SIGSEGV" in text


DEFECT = """
import os, sys
from ft import cli
from ft.job.agent.agent import Agent

turn = Agent._turn

def turn_until_the_run_has_begun(self):
    turn(self)
    if os.path.exists("run/logs/n0.w0.log") and os.path.exists("run/events.jsonl"):
        raise RuntimeError("the agent has a defect")

Agent._turn = turn_until_the_run_has_begun
sys.exit(cli.main())
"""


def test_an_agent_that_dies_of_an_exception_leaves_it_in_the_run_s_folder(tmp_path, jobs):
    (tmp_path / "train.py").write_text("import time; time.sleep(1000)")
    jobs.append(job := Job(tmp_path, ["--run-dir", "run", "--preload", "none", "train.py"], entry=("-c", DEFECT)))
    assert job.wait() == 1 and "RuntimeError: the agent has a defect" in job.text()
    done = ft("diagnose", "crash", tmp_path / "run")
    assert done.returncode == 1, done.stdout
    assert "first cause: RuntimeError: the agent has a defect\n  exception of the program on agent of n0" in done.stdout
    assert "in turn_until_the_run_has_begun" in done.stdout, "the stack"
