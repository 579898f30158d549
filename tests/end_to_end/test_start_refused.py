"""Runs that can never start: each is refused soon, with both nodes' names and what to do."""

import signal
import socket
import sys
from pathlib import Path

import pytest
from agent_jobs import ROOT, Job, ft
from ft_runs import Running, flags
from harness import started
from nodes import Lab, why_not
from pythons import environment

from ft.base import events
from ft.base.errors import ENDED_EARLY
from ft.platform.network import free_port

LIMIT_S = 180.0
SCRIPT = "import time\ntime.sleep(1000)\n"


@pytest.fixture
def two(tmp_path, jobs):
    """Return a function that starts the two agents of a run on this machine, each in a folder of its own."""

    def start(*arguments, run_dirs=("run", "run"), **environ_of_second: str) -> list[Job]:
        port = free_port()
        (tmp_path / "train.py").write_text(SCRIPT)
        for rank, run_dir in enumerate(run_dirs):
            here = tmp_path / f"node{rank}"
            here.mkdir(exist_ok=True)
            flags = ["--nnodes", 2, "--node-rank", rank, "--rdzv-endpoint", f"127.0.0.1:{port}"]
            flags += ["--run-dir", tmp_path / run_dir, "--preload", "none", tmp_path / "train.py", *arguments]
            jobs.append(Job(here, flags, **(environ_of_second if rank else {})))
        return jobs

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
        job.wait()


def refused_in(job: Job) -> str:
    """Return what the job has printed once it is refused; fail if it is not."""
    assert job.wait(LIMIT_S) in (1, 2), job.text()
    assert "fix: " in job.text(), job.text()
    return job.text()


def diagnosed(folder: Path) -> str:
    """Return what ``ft diagnose start`` says of a run that did not start."""
    done = ft("diagnose", "start", folder)
    assert done.returncode == 1, done.stdout
    return done.stdout


def test_a_data_set_that_one_node_lacks_is_named(two, tmp_path):
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "corpus.bin").write_bytes(b"")
    first, _ = two("--data-path", "corpus", "--save", "checkpoints")
    text = refused_in(first)
    machine = socket.gethostname()
    assert f"--data-path corpus is on n0 ({machine}), and not on n1 ({machine})" in text
    assert "mount on n1 what n0 has there" in text
    assert "2 of 2 agents joined" in (said := diagnosed(tmp_path / "run"))
    assert f"- --data-path corpus is on n0 ({machine})" in said and "  fix: mount on n1" in said


def test_versions_that_differ_are_named(two, tmp_path):
    (tmp_path / "other" / "torch-9.9.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "torch-9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9\n")
    first, _ = two(PYTHONPATH=f"{tmp_path / 'other'}:{ROOT}")
    text = refused_in(first)
    assert "torch is " in text and "9.9 on n1" in text and "install the same on every node" in text


def test_a_directory_that_is_not_shared_is_named(two):
    _, second = two(run_dirs=("run", "elsewhere"))
    text = refused_in(second)
    assert "has no token: it is not the directory of node 0" in text and "give a --run-dir that all nodes share" in text


def test_a_second_run_on_the_folders_of_one_under_way_is_refused_or_joins_it(corpus, jobs, tmp_path):
    def second(name: str, run_dir: Path, *of_ft: str) -> Job:
        (tmp_path / name).mkdir()
        words = ["--nproc-per-node", "2", "--run-dir", run_dir, *of_ft, ROOT / "pretrain_gpt.py"]
        jobs.append(Job(tmp_path / name, [*words, *model(8).split()]))
        return jobs[-1]

    def model(steps: int) -> str:
        return flags(corpus, f"--save {tmp_path}/save --log-interval 1", steps)

    first = Running(tmp_path / "run", "pretrain_gpt.py", model(100_000), nproc=2, standby=0)
    first.wait_for(lambda: first.step() >= 2)
    who = f"ft run on {socket.gethostname()}, pid {first.process.pid}, since 2"
    same_run, same_save = second("same_run", first.folder), second("same_save", tmp_path / "other")
    assert same_run.wait() == 2 and f"whose node 0 is at work: {who}" in same_run.text(), same_run.text()
    assert same_save.wait() == 2, same_save.text()
    assert f"--save {tmp_path}/save is in use by the run {first.folder} ({who}" in same_save.text()
    joined = second("joined", first.folder, "--join")
    joined.wait_for(lambda: "joins a run that is under way, as the spare n0-2" in joined.text(), "word of the spare")
    told = first.folder / "events.jsonl"
    first.wait_for(lambda: [event.name for event in events.read(told)].count(events.AGENT_JOINED) == 2)
    first.process.send_signal(signal.SIGTERM)
    joined.wait()
    done = first.wait()
    assert done.code == ENDED_EARLY and not done.named(events.RESTARTED), done.explain()
    afterwards = second("afterwards", tmp_path / "next")
    assert afterwards.wait() == 0, afterwards.text()


@pytest.fixture
def lab():
    if reason := why_not():
        pytest.skip(reason)
    with Lab(2) as made:
        yield made


def agents(lab: Lab, folder: Path, *of_second: str):
    """Start one agent on each host; return their processes and their output files."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    processes = []
    for host in lab.hosts:
        words = [sys.executable, "-m", "ft", "run", "--nnodes", "2", "--node-rank", str(host.index)]
        words += ["--rdzv-endpoint", f"{lab.hosts[0].address}:29400", "--run-dir", str(folder / "run")]
        words += [*(of_second if host.index else ()), "--preload", "none", str(folder / "train.py")]
        out = folder / f"{host.name}.out"
        processes.append((started.start(words, ROOT, environment(), out, host), out))
    return processes


def ends(process, out: Path) -> str:
    assert process.wait(LIMIT_S) in (1, 2), out.read_text()
    return out.read_text()


@pytest.mark.long
def test_an_address_of_the_wrong_interface_is_named(lab, tmp_path):
    lab.hosts[1].run("ip", "tuntap", "add", "eth1", "mode", "tun")
    lab.hosts[1].run("ip", "addr", "add", "192.168.99.2/24", "dev", "eth1")
    lab.hosts[1].run("ip", "link", "set", "eth1", "up")
    first, second = agents(lab, tmp_path / "run", "--local-addr", "192.168.99.2")
    text = ends(*first)
    ends(*second)
    assert "n0 (host0) cannot connect to n1 (host1) at 192.168.99.2:" in text, text
    assert "the address of its interface eth1" in text and "--local-addr ADDRESS" in text
    assert f"{lab.hosts[1].address} (eth0)" in text
    said = diagnosed(tmp_path / "run" / "run")
    assert "- n0 (host0) cannot connect to n1 (host1) at 192.168.99.2:" in said
    assert "n1 (host1) at " in said and "advertises 192.168.99.2" in said


@pytest.mark.long
def test_a_control_plane_that_one_host_cannot_reach_is_named_on_both(lab, tmp_path):
    lab.part([lab.hosts[1]])
    first, second = agents(lab, tmp_path / "run")
    of_second = ends(*second)
    of_first = ends(*first)
    told = f"host1 cannot connect to it at {lab.hosts[0].address}:29400"
    assert told in of_second and told in of_first, of_first + of_second
    assert "give --rdzv-endpoint an address of node 0" in of_first
    assert told in diagnosed(tmp_path / "run" / "run")
