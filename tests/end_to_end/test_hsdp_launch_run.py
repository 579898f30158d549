"""``ft run --ft-hsdp-replicas`` with small scripts: what is killed comes back, what ends leaves nothing."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest
from agent_jobs import Job
from harness import processes
from test_agent_run import ATTACHED

from ft import cli
from ft.base import events
from ft.platform import processes as linux
from ft.platform.network import free_port

LOOP = (
    ATTACHED
    + """
seated.wait()
replica, rank = os.environ["FT_HSDP_REPLICA"], os.environ["RANK"]
names = "RANK LOCAL_RANK WORLD_SIZE FT_RESTART FT_HSDP_REPLICAS FT_HSDP_LIFE FT_HSDP_LR_SCALING FT_HSDP_WAIT".split()
print(*(f"{name}={os.environ.get(name)}" for name in names), flush=True)
folder = os.environ["FT_HSDP_RUN_DIR"]
for step in range(1, 10_000):
    if os.path.exists(f"{folder}/stop"): break
    if os.path.exists(f"{folder}/fail-{replica}"): sys.exit(int(open(f"{folder}/fail-{replica}").read()))
    print("replica", replica, "rank", rank, "step", step, flush=True)
    time.sleep(0.05)
link.send(WorkerDone(worker, epoch, step))
over.wait()
"""
)
REPLICAS, EACH = 2, 2


class Run(Job):
    """A run of replicas that all train."""

    def __init__(self, folder: Path, text: str, flags: tuple, **environ: str):
        script = folder / "script.py"
        script.write_text(text)
        workers = ["--nproc-per-node", REPLICAS * EACH, "--ft-hsdp-replicas", REPLICAS, "--run-dir", "run"]
        super().__init__(folder, [*workers, "--preload", "none", *flags, script], **environ)
        self.run = folder / "run"

    def logs(self, replica: int) -> str:
        return "".join(log.read_text() for log in sorted((self.run / f"replica-{replica}" / "logs").glob("*.w*.log")))

    def events(self, replica: int, name: str) -> list[events.Event]:
        found = events.read(self.run / f"replica-{replica}" / "events.jsonl")
        return [event for event in found if event.name == name]

    def wait_trains(self, *replicas: int, restarts: int = 0) -> None:
        """Until every rank of each has done a step in the given life or restart."""
        for replica in replicas or range(REPLICAS):
            self.wait_for(lambda r=replica: self._trains(r, restarts), f"steps of replica {replica}")

    def _trains(self, replica: int, restarts: int) -> bool:
        text = self.logs(replica)
        began = text.count(f"FT_RESTART={restarts} ")
        return began == EACH and all(text.count(f"rank {rank} step 1\n") > 0 for rank in range(EACH))

    def worker(self, replica: int) -> int:
        return self.events(replica, events.WORKER_STARTED)[-1].detail["pid"]

    def agent(self, replica: int) -> int:
        return self.pid_of(f"ft-replica-{replica}")

    def server(self) -> int:
        return json.loads((self.run / "quorum.json").read_text())["pid"]

    def steps(self, replica: int) -> int:
        return self.logs(replica).count("step")

    def stop(self) -> None:
        """Has all scripts end well."""
        (self.run / "stop").touch()


@pytest.fixture
def replicas(tmp_path, jobs):
    def start(*flags, text: str = LOOP, **environ) -> Run:
        jobs.append(Run(tmp_path, text, flags, **environ))
        return jobs[-1]

    return start


def test_every_replica_is_a_world_of_its_own_and_one_that_is_lost_after_the_others_finish_is_not_waited_for(replicas):
    text = LOOP.replace('f"{folder}/stop"', 'f"{folder}/stop-{replica}"')
    run = replicas("--ft-hsdp-lr-scaling", "linear", "--ft-hsdp-wait", "0.5s", text=text)
    run.wait_trains()
    for replica in range(REPLICAS):
        for rank in range(EACH):
            said = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={EACH} FT_RESTART=0 FT_HSDP_REPLICAS={REPLICAS} "
            assert said + "FT_HSDP_LIFE=0 FT_HSDP_LR_SCALING=linear FT_HSDP_WAIT=0.5" in run.logs(replica)
    assert (run.run / "token").read_text() != (run.run / "replica-1" / "token").read_text()
    run.wait_for(lambda: "replica 0 rank 0 step 1\n" in run.text(), "the steps of the first replica")
    (run.run / "stop-0").touch()
    run.wait_for(lambda: "replica 0 has finished" in run.text(), "the end of replica 0")
    os.kill(run.agent(1), signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert "the run has finished, without replica(s) 1" in run.text()


def test_a_killed_worker_costs_its_replica_a_warm_restart_and_a_killed_quorum_server_nobody_anything(replicas):
    run = replicas()
    run.wait_trains()
    for number in (1, 2, 3, 4):  # more than the three of a run without replicas
        os.kill(run.worker(1), signal.SIGKILL)
        run.wait_trains(1, restarts=number)
    assert not run.events(0, events.RESTARTED) and run.agent(0) and run.logs(0).count("FT_RESTART") == EACH
    run.wait_for(lambda: "ft: replica 1: warm restart 4" in run.text(), "the news of the last restart")
    assert "replica 1 rank" not in run.text()
    first = run.server()
    os.kill(first, signal.SIGKILL)
    run.wait_for(lambda: run.server() != first, "another quorum server")
    run.process.send_signal(signal.SIGINT)  # which these scripts do not listen to
    assert run.wait() == 128 + signal.SIGINT, run.text()
    assert len(run.events(1, events.RESTARTED)) == 4 and not run.events(0, events.RESTARTED)


def test_a_killed_agent_is_started_again_without_its_leftovers_in_a_life_of_its_own(replicas):
    run = replicas("--inject", "kill-agent@replica=0:step=5")  # the scripts' beats say step 5 from the start
    run.wait_trains(1)
    run.wait_trains(0, restarts=1)
    assert run.events(0, events.FAULT_INJECTED) and not run.events(1, events.FAULT_INJECTED)
    assert "FT_HSDP_LIFE=1" in run.logs(0) and "FT_RESTART=1" not in run.logs(1)
    os.kill(run.worker(0), signal.SIGKILL)
    run.wait_trains(0, restarts=2)
    before = [run.worker(0), *linux.children(run.agent(0))]
    os.kill(run.agent(0), signal.SIGKILL)
    run.wait_trains(0, restarts=3)
    assert not [pid for pid in before if processes.runs(pid)]
    run.stop()
    assert run.wait() == 0, run.text()
    assert run.text().count("its agent was killed by SIGKILL; another one is started") == 2


def test_a_second_launcher_is_refused_and_changes_nothing_and_nothing_outlives_the_first_that_is_killed(replicas):
    run = replicas()
    run.wait_trains()
    second = replicas()
    assert second.wait() == 2, second.text()
    assert f"whose node 0 is at work: ft run on {socket.gethostname()}, pid {run.process.pid}, since" in second.text()
    assert not run.events(0, events.RESTARTED) and not run.events(1, events.RESTARTED)
    assert len(run.left()) > 2 * (EACH + 2)
    run.process.kill()
    run.process.wait()  # the fixture complains of what is left


def test_a_signal_reaches_every_worker_once_and_ends_the_run(replicas):
    text = LOOP.replace("seated.wait()", "import signal\nsignal.signal(signal.SIGTERM, leave)\nseated.wait()")
    saves = (
        "def leave(*_):\n    os.write(1, b'saves\\n')\n    link.send(WorkerDone(worker, epoch, 1))\n    sys.exit(0)\n"
    )
    run = replicas(text=text.replace("import signal\n", f"import signal\n{saves}"))
    run.wait_trains()
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)  # Slurm and srun may both pass on the same request
    assert run.wait() == 0, run.text()
    for replica in range(REPLICAS):
        assert run.logs(replica).count("saves") == EACH
    assert run.text().count("all replicas are told to save and end") == 1


def test_with_fewer_replicas_than_the_minimum_the_run_ends(replicas):
    run = replicas("--ft-hsdp-min-replicas", "2")
    run.wait_trains()
    (run.run / "fail-1").write_text("2")
    assert run.wait() == 2
    assert "1 of 2 replicas are left, at least 2 must be" in run.text()


def test_a_replica_that_fails_for_ever_is_given_up_and_can_be_brought_back_alone(
    replicas, jobs, tmp_path, monkeypatch, capsys
):
    run = replicas()
    run.wait_trains()
    (run.run / "fail-1").write_text("2")
    run.wait_for(lambda: "replica 1 is given up" in run.text(), "the end of replica 1")
    assert "--ft-hsdp-replica 1" in run.text()
    steps = run.steps(0)
    run.wait_for(lambda: run.steps(0) > steps + 5, "further steps of replica 0")
    (run.run / "fail-1").unlink()
    flags = ["--nproc-per-node", EACH, "--ft-hsdp-replicas", REPLICAS, "--ft-hsdp-replica", 1, "--run-dir", "run"]
    jobs.append(back := Job(tmp_path, [*flags, "--preload", "none", tmp_path / "script.py"]))
    run.wait_for(lambda: run.logs(1).count("FT_HSDP_LIFE=1") == EACH, "replica 1")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", *map(str, flags), "script.py"]) == 2
    assert "replica 1 is running already" in capsys.readouterr().err
    run.stop()
    assert back.wait() == 0, back.text()
    assert run.wait() == 0, run.text()


def test_two_launchers_share_a_run_and_the_second_takes_the_quorum_server_over(tmp_path, jobs):
    (tmp_path / "script.py").write_text(LOOP)
    flags = ["--nnodes", 2, "--nproc-per-node", EACH, "--ft-hsdp-replicas", 2, "--run-dir", "run", "--preload", "none"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    jobs += [Job(tmp_path, [*flags, "--node-rank", rank, tmp_path / "script.py"]) for rank in range(2)]
    run = tmp_path / "run"
    for replica, job in enumerate(jobs):
        log = run / f"replica-{replica}" / "logs" / "n0.w1.log"
        job.wait_for(lambda log=log: log.exists() and "step 5\n" in log.read_text(), f"replica {replica}")
    first = _standing(run)
    jobs[0].process.kill()
    jobs[0].process.wait()
    now = jobs[1].wait_for(lambda: _standing(run)["term"] > first["term"] and _standing(run), "another server")
    assert now["pid"] != first["pid"]
    (run / "stop").touch()
    assert jobs[1].wait() == 0, jobs[1].text()


def _standing(run: Path) -> dict:
    return json.loads((run / "quorum.json").read_text())


def test_a_folder_with_an_earlier_run_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    flags = ["--nproc-per-node", "2", "--ft-hsdp-replicas", "2", "--run-dir", "run"]
    assert cli.main(["run", *flags, "script.py"]) == 2
    assert "earlier run" in capsys.readouterr().err
    assert cli.main(["run", *flags, "--run-dir", "other", "nothing.py"]) == 2
    assert "nothing.py does not exist" in capsys.readouterr().err
