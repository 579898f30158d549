"""The harness keeps its promises: results in order, the first error once, deadlines, and nothing left behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from harness import RankFailed, RanksHung, RanksLeftBehind, processes, started


def rank_and_sum(offset, scale=1):
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item() * scale


def where_from():
    return os.getppid(), id(torch), torch.get_num_threads(), os.getcwd()


def environment():
    print("a rank speaks")
    os.write(2, b"past Python's buffers\n")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "FROM_CALL", "FROM_TEST")
    return [os.environ.get(name) for name in names] + [int(os.environ["MASTER_PORT"]) > 0, dist.is_initialized()]


def one_fails(culprit):
    if dist.get_rank() == culprit:
        raise ValueError("the culprit's message")
    dist.barrier()
    time.sleep(60)


def one_dies_by(culprit, signum):
    if dist.get_rank() == culprit:
        os.kill(os.getpid(), signum)
    time.sleep(60)


def hang_in_here():
    print("about to hang")
    time.sleep(60)


def obey(patience=60):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    print("listening", flush=True)
    time.sleep(patience)


def leave_a_process_behind(own_session):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=own_session)


def start_a_child_and_hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print(f"child {child.pid}.", flush=True)
    time.sleep(60)


def test_the_imports_are_paid_once(ranks):
    first, second = ranks(where_from, 2), ranks(where_from, 2, init=False)
    parents, modules, threads, _ = zip(*first, *second, strict=True)
    assert set(parents) == {ranks.server.pid}
    assert len(set(modules)) == 1  # forked with torch at one address, not imported afresh
    assert set(threads) == {1}
    assert first[0][3] != second[0][3]


def test_the_environment_is_torchruns_and_output_is_kept_per_rank(ranks, monkeypatch):
    monkeypatch.setenv("FROM_TEST", "b")
    got = ranks(environment, 2, init=False, env={"FROM_CALL": "a"})
    assert got == [[str(rank), "2", str(rank), "127.0.0.1", "a", "b", True, False] for rank in range(2)]
    assert ranks.output(1).splitlines() == ["a rank speaks", "past Python's buffers"]


def test_the_first_error_is_shown_once_and_the_rest_is_stopped(ranks):
    begin = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        ranks(one_fails, 3, 1)
    text = str(failure.value)
    assert text.startswith("rank 1 of 3 failed first (rank 1: ValueError: the culprit's message)")
    assert text.count("Traceback") == 1
    assert "in one_fails" in text and "harness/" not in text
    assert time.monotonic() - begin < 30  # far from the 60 s that the others would have slept


def test_a_rank_that_is_killed_is_named(ranks):
    with pytest.raises(RankFailed, match=r"rank 2 of 3 failed first \(rank 2: killed by SIGKILL\)"):
        ranks(one_dies_by, 3, 2, signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 0: killed by SIGSEGV"):
        ranks(one_dies_by, 2, 0, signal.SIGSEGV)


def test_a_hang_ends_at_the_deadline_and_shows_where(ranks):
    with pytest.raises(RanksHung) as hang:
        ranks(hang_in_here, 2, timeout=20, init=False)
    text = str(hang.value)
    assert text.count("in hang_in_here") == 2
    assert "about to hang" in text
    with pytest.raises(RanksHung, match="stopped by a signal"):
        ranks(one_dies_by, 2, 1, signal.SIGSTOP, timeout=20)


def test_ranks_can_be_killed_one_by_one(ranks):
    handle = ranks.start(obey, 3, init=False)
    for rank in range(3):
        handle.wait_for_output(rank, "listening")
    assert handle.exitcode(0) is None
    handle.kill(0)
    handle.kill(1, signal.SIGTERM)
    handle.kill(2, signal.SIGSTOP)
    time.sleep(0.1)
    assert handle.exitcode(2) is None
    handle.kill(2, signal.SIGKILL)
    assert [outcome.exitcode for outcome in handle.wait()] == [-signal.SIGKILL, 7, -signal.SIGKILL]
    with pytest.raises(ProcessLookupError, match="rank 0 has ended with -9"):
        handle.kill(0)


def test_two_calls_can_run_side_by_side_and_results_come_in_rank_order(ranks):
    with ranks.start(obey, 1, init=False) as other:
        other.wait_for_output(0, "listening")
        assert ranks(rank_and_sum, 3, 10, scale=2) == [(0, 66.0), (1, 66.0), (2, 66.0)]
        assert other.exitcode(0) is None
    assert not processes.runs(other.pids[0])


@pytest.mark.parametrize("own_session", [False, True])
def test_a_process_left_behind_is_an_error_and_is_killed(ranks, own_session):
    with pytest.raises(RanksLeftBehind, match="sleep"):
        ranks(leave_a_process_behind, 1, own_session, init=False)
    assert processes.members((), {ranks.server.pid}) == []


def test_what_a_killed_rank_had_started_dies_too(ranks):
    handle = ranks.start(start_a_child_and_hang, 1, init=False)
    handle.wait_for_output(0, ".")
    child = int(handle.output(0).split()[1].rstrip("."))
    handle.kill(0)
    handle.wait()
    assert not processes.runs(child)


@pytest.mark.on_ranks(1, init=False)
def test_helpers_end_as_in_a_real_interpreter():
    manager = multiprocessing.get_context("spawn").Manager()
    assert manager.list([1, 2])[1] == 2


def test_a_killed_server_is_started_again(ranks):
    handle = ranks.start(obey, 1, init=False)
    handle.wait_for_output(0, "listening")
    os.kill(ranks.server.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="server died"):
        handle.wait()
    handle.close()
    assert not processes.runs(handle.pids[0])
    assert ranks(rank_and_sum, 2, 0) == [(0, 1.0), (1, 1.0)]


def test_only_functions_of_a_module_are_taken(ranks):
    with pytest.raises(TypeError, match="top level"):
        ranks(lambda: None, 1)


@pytest.mark.parametrize("replicas", [0, 2])
def test_no_process_of_a_run_pays_the_imports(replicas, tmp_path):
    (tmp_path / "script.py").write_text("import time, torch\nprint('up', flush=True)\ntime.sleep(1000)\n")
    flags = ["--run-dir", "run", "--nproc-per-node", 2, *(["--ft-hsdp-replicas", replicas] if replicas else [])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "ft", "run", *flags, "script.py"]
    run = started.start(words, tmp_path, environ, tmp_path / "output")
    try:
        logs, deadline = [], time.monotonic() + 120
        while sum(log.read_text().count("up") for log in logs) < 2:
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            logs = [*tmp_path.glob("run/**/logs/*.w*.log")]
            time.sleep(0.05)
        lines = []
        for pid in run.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):  # a process that only starts others
                lines += filter(None, [psutil.Process(pid).cmdline()])
        assert len(lines) >= 5 and all("harness.server" in line for line in lines), lines
    finally:
        run.kill()
        run.wait()
