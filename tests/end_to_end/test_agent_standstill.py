"""Starts that get nowhere: processes that others wait for and that do nothing are started again, or end the run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_jobs import DEADLINE_S, ROOT, Job
from harness import processes
from pythons import environment
from waiting import eventually

from ft.job.agent.options import Script
from ft.job.agent.pool import PoolBroken, WarmPool
from ft.platform.processes import Standstill
from ft.platform.supervisor import Supervisor

START = """
import sys
sys.path.remove("")  # a torch.py of the test's is for the pool alone
from ft.cli import main
sys.exit(main())
"""


@pytest.fixture
def ft_run(tmp_path, jobs):
    def start(text: str, *flags, **environ: str) -> Job:
        (tmp_path / "script.py").write_text(text)
        (tmp_path / "limits.yaml").write_text("stuck_s: 4")
        command = ["--run-dir", "run", "--limits", "limits.yaml", *flags, "script.py"]
        jobs.append(Job(tmp_path, command, ("-c", START), **environ))
        return jobs[-1]

    return start


def stops_once(folder: Path, when: str = "True") -> str:
    """Return a program that stops its process, the first one in which ``when`` is true."""
    seen = f"pathlib.Path({str(folder / 'seen')!r})"
    stops = f"{seen}.touch(), os.kill(os.getpid(), signal.SIGSTOP)"
    return f"import os, pathlib, signal, sys\nif {when} and not {seen}.exists(): {stops}\n"


def test_a_pool_that_never_answers_ends_the_run_with_what_was_waited_for(ft_run, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")  # imported first
    job = ft_run("", "--nproc-per-node", "2")
    assert job.wait() == 1
    said = job.text()
    assert "the run ends: 3 warm pools in a row have forked no worker" in said
    assert "the warm pool owes 2 worker(s) and has done nothing for" in said and "is stopped)" in said


def test_a_pool_that_is_stopped_is_replaced_and_the_run_starts(ft_run, tmp_path):
    (tmp_path / "torch.py").write_text(stops_once(tmp_path))
    job = ft_run("print('the script runs')\n", "--nproc-per-node", "1")
    assert job.wait() == 0
    said = job.text()
    assert "it is killed" in said and "the script runs" in said


def test_a_control_plane_that_is_stopped_before_it_serves_is_replaced(ft_run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(stops_once(tmp_path, "'ft.job.control.sidecar' in str(sys.orig_argv)"))
    found = f"{ROOT}{os.pathsep}{tmp_path}"
    job = ft_run("print('the script runs')\n", "--preload", "none", "--nproc-per-node", "1", PYTHONPATH=found)
    assert job.wait() == 0
    said = job.text()
    assert "the control plane that is to start has done nothing for" in said and "the script runs" in said


def test_time_without_polls_does_not_count(tmp_path):
    """An agent that was stopped together with its pool must not blame the pool."""
    child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(900)"], stdout=-1)
    try:
        child.stdout.readline()
        standstill = Standstill()
        standstill.look(100.0, child.pid)
        while not standstill.look(110.0, child.pid):  # its last steps before it sleeps
            standstill = Standstill()
            standstill.look(100.0, child.pid)
        assert standstill.look(500.0, child.pid) <= 4.0
        assert standstill.look(501.0, child.pid, said=1) == 0.0
    finally:
        child.kill()
        child.wait()


def ignore(code):
    """Do nothing about the exit of a process: the test waits for it itself."""


def test_a_stuck_pool_is_told_from_one_that_owes_nothing(tmp_path):
    (tmp_path / "s.py").write_text("")
    script = Script(str(tmp_path / "s.py"), False, [], ["none"])
    pool = WarmPool(Supervisor(), script, tmp_path / "pool.log", stuck_s=5.0)
    assert all(pool.kill_if_stuck(float(now)) == "" for now in range(100))
    pool.start(ignore)
    try:
        os.kill(pool.process.pid, signal.SIGSTOP)
        assert all(pool.kill_if_stuck(float(now)) == "" for now in range(100, 200)), "nobody waits for it"
        pool.fork("n0.w0", str(tmp_path / "w.log"), {})
        said = next(filter(None, (pool.kill_if_stuck(float(now)) for now in range(200, 240))))
        assert said.startswith("the warm pool owes 1 worker(s) and has done nothing for 6 s")
        code = pool.process.wait()
        for _ in range(2):
            pool.restart(code, ignore)
            os.kill(pool.process.pid, signal.SIGKILL)
            code = pool.process.wait()
        with pytest.raises(PoolBroken, match="3 warm pools in a row"):
            pool.restart(code, ignore)
    finally:
        pool.close()


def test_requests_that_the_pool_did_not_take_at_once_go_out_later(tmp_path):
    """More than the socket holds; every request is answered in the end, whoever asks nothing more."""
    (tmp_path / "s.py").write_text("")
    pool = WarmPool(Supervisor(), Script(str(tmp_path / "s.py"), False, [], ["none"]), tmp_path / "pool.log")
    pool.start(ignore)
    born = []
    try:
        os.kill(pool.process.pid, signal.SIGSTOP)  # it reads nothing meanwhile
        for number in range(4):
            pool.fork(f"n0.w{number}", str(tmp_path / "w.log"), {"LONG": "x" * 200_000})
        assert pool.channel.wants_write
        os.kill(pool.process.pid, signal.SIGCONT)
        eventually(lambda: pool.flush() or born.extend(pool.take()[0]) or len(born) == 4)
    finally:
        processes.end([pid for _, pid in born])
        pool.close()
        pool.process.wait(DEADLINE_S)
    assert [name for name, _ in born] == [f"n0.w{number}" for number in range(4)]


def test_random_faults_start_however_many_are_planned(ft_run, tmp_path):
    """1000 faults were more than the pool's socket held for four workers: the rest of the requests was never sent."""
    faults = "kill@every=exponential(mean=9h):rank=random"
    flags = ("--preload", "none", "--nproc-per-node", "4", "--standby", "1", "--inject", faults)
    job = ft_run("print('a worker runs')\n", *flags)
    assert job.wait() == 2, "faults were planned, and no worker has joined the run"
    assert job.text().count("a worker runs") >= 1
    assert len(json.loads((tmp_path / "run" / "faults.n0.json").read_text())) > 10


def test_output_that_nobody_reads_stops_nothing(tmp_path):
    """A pager that is not scrolled: the agent goes on, the run ends, and then all of it is to be read."""
    (tmp_path / "script.py").write_text("for line in range(4000): print(line, 'x' * 100)\n")
    command = [sys.executable, "-m", "ft", "run", "--run-dir", "run", "--preload", "none", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE) as job:
        try:
            events = tmp_path / "run" / "events.jsonl"
            eventually(lambda: events.exists() and "finished" in events.read_text())
            said, _ = job.communicate(timeout=DEADLINE_S)
        finally:
            job.kill()
    lines = [line.split()[0] for line in said.decode().splitlines() if not line.startswith("ft:")]
    assert job.returncode == 0 and lines == [str(number) for number in range(4000)]
