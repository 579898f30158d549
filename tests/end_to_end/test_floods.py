"""Strangers open thousands of connections to every port of a run whose processes may open 1024 files each."""

import contextlib
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import replica_runs
from flood import __file__ as FLOOD
from ft_runs import Running, flags

NUMBER, STEPS = 5000, 300

pytestmark = pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[1] < NUMBER + 100,
    reason=f"the flood needs {NUMBER + 100} file descriptors: raise ulimit -n",
)


def flooded(job: Running) -> list[str]:
    """Flood every port of a run from its first step on; return the ports that were flooded before the run ended."""
    job.wait_for(lambda: job.step() > 0)
    root = psutil.Process(job.process.pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a process that only starts others may end meanwhile
            process.rlimit(psutil.RLIMIT_NOFILE, (1024, 1024))
    words = [sys.executable, str(Path(FLOOD)), str(job.process.pid), str(NUMBER), "0.1"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_hot_swap_recovers_meanwhile_with_the_same_losses(corpus, reference, tmp_path):
    layout = "--use-distributed-optimizer --pipeline-model-parallel-size 2"
    faults = f"kill@step={STEPS // 2}:rank=2:phase=backward"
    job = Running(tmp_path / "run", "pretrain_gpt.py", flags(corpus, layout, STEPS), options=f"--inject {faults}")
    ports = flooded(job)
    done = job.wait()
    assert done.code == 0 and len(ports) > 10, done.explain()
    assert len(done.named("resumed")) == 2 and not done.named("restarted"), done.explain()
    assert done.losses == reference(4, layout, STEPS)


@pytest.mark.long
def test_replicas_lose_nobody(corpus, tmp_path):
    faults = "slow@replica=0:step=2:rank=0:factor=2:for=300s"
    flags = replica_runs.flags(corpus, "--use-distributed-optimizer", STEPS, 16)
    job = replica_runs.Replicas(tmp_path / "run", flags, replicas=2, nproc=4, options=f"--inject {faults}")
    ports = flooded(job)
    done = job.wait()
    done.check(STEPS, 0)
    assert len(ports) > 10, done.explain()
