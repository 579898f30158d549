"""`mpirun ft run --ft-transport mpi`: one agent per node, faults of workers and of whole nodes."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
import replica_runs
from ft_runs import ROOT, Finished, Running, flags
from networks import mpirun
from pythons import environment

from ft.systems.hsdp import commits

# Data-parallel peers on different nodes, so that no node holds a state and its only copy.
LAYOUT = "--use-distributed-optimizer --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
STEPS = 120
START_S = 150.0
"""Seconds for the first steps: mpirun starts all processes of three nodes, and each imports torch."""


def test_a_worker_and_then_a_node_are_replaced_over_mpi(corpus, reference, tmp_path):
    run = MpiRun(tmp_path, flags(corpus, f"{LAYOUT} --ft-transport mpi", STEPS))
    run.wait_for(lambda: run.step() >= 5 and run.standbys() >= {"n0.w2", "n2.w0", "n2.w1"}, START_S)
    assert list(run.relays()) == ["n0", "n1", "n2"]
    os.kill(run.holder("n0"), signal.SIGKILL)
    run.wait_for(lambda: run.so_far().named("resumed"))
    # The next fault waits until both copies of every state exist again.
    resumed = run.step()
    run.wait_for(lambda: run.step() >= resumed + 10)
    [agent] = run.relays()["n1"].children()
    agent.kill()
    done = run.wait(180)
    assert done.code == 0, done.explain()
    assert not done.named("restarted"), done.explain()
    assert done.named("fault_detected")[-1].detail["signal"] == "node lost"
    assert {seat.split(".")[0] for seat in run.seats().values()} == {"n0", "n2"}
    assert done.losses == reference(4, LAYOUT, STEPS)


@pytest.mark.long
def test_replicas_exchange_over_mpi_and_go_on_without_the_one_whose_node_dies(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("FT_HSDP_DIGESTS", "1")
    steps = 60
    run = MpiRun(
        tmp_path, replica_runs.flags(corpus, steps=steps), 1, "--standby 0 --ft-transport mpi --ft-hsdp-replicas 3"
    )
    run.wait_for(lambda: len(commits.read(run.folder / "replica-0")) >= 5, START_S)
    [launcher] = run.relays()["n1"].children()
    launcher.kill()
    done = run.wait(180)
    proof = replica_runs.proof(run.folder)
    assert done.code == 0 and not proof.problems(steps, 1), f"{proof.problems(steps, 1)}\n{done.explain()}"
    assert proof.lineage.steps[-1].commit.healthy == (0, 2), done.explain()


class MpiRun(Running):
    """Three nodes on this machine. As it is, the last carries standbys, and there is one beside the others' workers."""

    def __init__(self, tmp_path, script_flags: str, nproc: int = 2, options: str = "--standby-nodes 1 --standby 1"):
        self.folder = tmp_path / "run"
        self._log = tmp_path / "mpirun.out"
        command = [*mpirun(3), sys.executable, "-m", "ft", "run", *options.split()]
        command += [
            "--nproc-per-node",
            str(nproc),
            "--run-dir",
            str(self.folder),
            "pretrain_gpt.py",
            *script_flags.split(),
        ]
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
            )

    def standbys(self) -> set[str]:
        return {event.worker for event in self.so_far().named("standby_ready")}

    def so_far(self) -> Finished:
        return Finished(0, "", self.folder)

    def seats(self) -> dict[str, str]:
        """Who holds each logical rank in the newest epoch."""
        return self.so_far().named("epoch_opened")[-1].detail["seats"]

    def relays(self) -> dict[str, psutil.Process]:
        """The MPI process of each node that is left."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        found = [process for process in below if process.name() == "ft-mpi"]
        return dict(sorted((f"n{process.environ()['OMPI_COMM_WORLD_RANK']}", process) for process in found))

    def holder(self, node: str) -> int:
        """The pid of a worker of ``node`` that holds a logical rank."""
        names = [name for name in self.seats().values() if name.startswith(f"{node}.")]
        below = self.relays()[node].children(recursive=True)
        return next(process.pid for process in below if process.name() in names)
