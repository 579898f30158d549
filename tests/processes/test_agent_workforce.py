"""The workers of one agent, where the order of what is heard decides."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ft.job.agent import environment
from ft.job.agent.link import socket_address
from ft.job.agent.options import Cluster, RunOptions, Script
from ft.job.agent.workforce import WorkerListener, Workforce, listen
from ft.job.control.timeouts import Timeouts
from ft.job.messages import Beat, WorkerDone, WorkerExited, WorkerResumed, decode, encode
from ft.net.channel import Channel
from ft.platform import processes
from ft.platform.supervisor import Supervisor

IDLES = "print(flush=True); input()"


class Pool:
    """Says that a worker exists when the test does."""

    def __init__(self):
        self.asked, self.born = [], []

    def bear(self, name: str, program: str = IDLES, *words: str) -> subprocess.Popen:
        """Say that a worker exists; it is a Python program of its own, which has printed its first line."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", program, *words], start_new_session=True, **pipes)
        process.stdout.readline()
        self.born = [(name, process.pid)]
        return process

    def fork(self, name, log, env):
        self.asked.append(name)

    def forget(self, pid):
        """Do nothing: this pool guards nobody."""

    def take(self):
        born, self.born = self.born, []
        return born, []


def begin(tmp_path):
    """Return a workforce, its pool, what it posts, and a worker that the pool has not reported yet."""
    cluster, script = Cluster(1, 0, 0, "127.0.0.1", 0), Script("train.py", False, [])
    options = RunOptions(script, cluster, 1, 0, tmp_path, "id", 0)
    place = environment.NodeContext(options, "n0", "127.0.0.1", "none")
    pool, posted = Pool(), []
    workforce = Workforce(pool, place, posted.append, lambda channel: None, Timeouts())
    return workforce, pool, posted, workforce.spawn(0, 0, 0, ("127.0.0.1", 1))


def test_a_worker_that_is_to_end_before_its_start_is_reported_may_still_save(tmp_path):
    workforce, pool, _, late = begin(tmp_path)
    workforce.terminate({late.name})
    saves = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    process = pool.bear(late.name, f"{saves}; {IDLES}")
    assert workforce.hear_pool() == []
    assert process.wait(180) == 7


def test_a_worker_that_the_pool_forks_when_the_run_is_over_is_killed(tmp_path):
    workforce, pool, posted, late = begin(tmp_path)
    workforce.drop_unborn()
    process = pool.bear(late.name)
    assert workforce.hear_pool() == []
    assert process.wait(180) == -9 and posted == []


HOLDS = """
import os, signal, sys
fd = os.memfd_create("ft-snapshot")
os.write(fd, b"a snapshot")
os.memfd_create("another")
if "hangs" in sys.argv:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
print(flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_the_snapshots_of_a_hung_worker_that_is_killed_are_there_for_its_successor_until_training_goes_on(tmp_path):
    workforce, pool, _, hung = begin(tmp_path)
    heir, second = (workforce.spawn(None, device, 0, ("127.0.0.1", 1)) for device in (1, 2))
    process = pool.bear(hung.name, HOLDS, "hangs")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    workforce.hear_pool()
    workforce.kill_hung(hung.name, rank=3)
    assert process.wait(180) == -9

    mine, other = socket.socketpair()
    heir.channel = second.channel = Channel(mine)
    workforce.hand_over_snapshots({2: "n1.w1", 3: "n1.w0"})
    workforce.hand_over_snapshots({2: heir.name, 3: hung.name})  # ordered before the end was known
    workforce.hand_over_snapshots({2: heir.name, 3: "n1.w0", 4: heir.name})
    workforce.hand_over_snapshots({2: "n1.w0", 3: heir.name})
    workforce.hand_over_snapshots({3: second.name})  # who has them keeps them, as long as it lives
    workforce.kill(heir.name)
    workforce.hand_over_snapshots({3: second.name})
    orders = [decode(line) for line in other.recv(1 << 16).splitlines()]
    assert [(order.rank, order.is_successor) for order in orders] == [(3, False), (3, True), (3, True)]
    (path,) = orders[-1].files
    assert Path(path).read_bytes() == b"a snapshot"
    workforce.kept_snapshots.clear()
    assert not os.path.exists(path)


@pytest.mark.parametrize(("rank", "signum", "is_kept"), [(3, 11, True), (3, 6, True), (3, 9, False), (None, 11, False)])
def test_the_snapshots_of_a_crashed_worker_are_there_for_its_successor_and_of_no_other(tmp_path, rank, signum, is_kept):
    workforce, pool, _, worker = begin(tmp_path)
    process = pool.bear(worker.name, HOLDS)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    mine, other = socket.socketpair()
    worker.channel = Channel(mine)
    workforce.hear_pool()
    gc.collect()  # closes the sockets of other tests
    free = len(os.listdir("/proc/self/fd"))
    for number in (7, 7, 8):  # opened once; opened anew, and once only
        beat = Beat(age_s=0.0, epoch=0, step=7, doing="compute", since_s=0.0, memory=number)
        other.send(f"{encode(beat)}\n".encode())
        workforce.hear(worker)
        assert len(os.listdir("/proc/self/fd")) == free + 1
    process.send_signal(signum)
    process.send_signal(signal.SIGCONT)
    code = process.wait(180)
    workforce.kept_snapshots.follow(process.pid, 9)  # the last heartbeat, read too late
    workforce.kept_snapshots.ended(process.pid, rank, code)
    kept = workforce.kept_snapshots.of(3)
    assert [Path(path).read_bytes() for path in kept] == [b"a snapshot"] * is_kept
    workforce.kept_snapshots.clear()
    assert len(os.listdir("/proc/self/fd")) == free


def test_a_worker_that_is_being_killed_is_reported_once_and_before_it_was_reaped(tmp_path):
    workforce, pool, posted, worker = begin(tmp_path)
    process = pool.bear(worker.name)
    workforce.hear_pool()
    assert not workforce.report_killed() and processes.killed_by(process.pid) == 0
    process.kill()
    while not workforce.report_killed():
        assert process.returncode is None
    assert not workforce.report_killed()
    assert workforce.ended(process.pid, process.wait(180)) is worker and not workforce.workers
    assert [one.code for one in posted if isinstance(one, WorkerExited)] == [-9]


def test_a_worker_that_ends_by_itself_is_not_taken_for_killed():
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    while processes.state(process.pid) != "Z":
        assert processes.killed_by(process.pid) == 0
    assert processes.killed_by(process.pid) == 0 and process.wait(180) == 9


def test_a_run_is_guarded_once_a_worker_has_committed_a_step_of_an_epoch(tmp_path):
    workforce, _, _, worker = begin(tmp_path)
    beat = Beat(age_s=0.0, epoch=0, step=7, doing="compute", since_s=0.0)
    for report in (beat, WorkerResumed(worker.name, 0, 7), beat):
        workforce._take(worker, encode(report))
        assert not workforce.is_guarded, "the first snapshots may be on their way"
    workforce._take(worker, encode(replace(beat, step=8)))
    assert workforce.is_guarded


def test_pauses_of_the_agent_are_no_silence_of_its_workers_and_no_time_in_their_activity(tmp_path):
    workforce, _, posted, worker = begin(tmp_path)
    worker.attached, worker.channel, worker.pid = True, object(), os.getpid()
    worker.beat, worker.beat_at = Beat(age_s=0.0, epoch=0, step=7, doing="compute", since_s=0.5, at_step_s=2.0), 99.95
    posted.clear()
    assert workforce.judge(100.0) == workforce.judge(160.0) == [] and posted == []
    assert workforce.beats(160.0)[worker.name].age_s == 0.05
    beat = replace(worker.beat, since_s=60.6, at_step_s=62.1)  # sent after the pause
    worker.beat, worker.beat_at = beat, 160.05
    workforce.judge(160.1)
    heard = workforce.beats(160.1)[worker.name]
    assert (heard.age_s, heard.since_s, heard.at_step_s) == (0.05, 0.6, 2.1)
    for tenth in range(1602, 1910):
        found = workforce.judge(tenth / 10)
        if found:
            break
    assert found[0].silent_s > 30.0, "it is silent afterwards"


def test_a_run_that_ends_before_the_next_heartbeat_was_guarded(tmp_path):
    workforce, _, _, worker = begin(tmp_path)
    for report in (WorkerResumed(worker.name, 0, 0), WorkerDone(worker.name, 0, 3)):
        workforce._take(worker, encode(report))
    assert workforce.is_guarded


@pytest.mark.parametrize(
    "hello",
    [
        *(b"[" * 200_000 + b"\n", b"[" * 200_000, b'{"worker": ["n0.w0"]}\n', b"5\n", b"\xff\n"),
        *(b'{"worker": "n0.w0", "stacks": 1e400}\n', b'{"worker": 1e400}\n'),
    ],
    ids=lambda hello: str(hello[:20]),
)
def test_a_first_line_that_makes_no_sense_closes_its_connection_only(hello, tmp_path):
    workforce, _, _, worker = begin(tmp_path)
    supervisor, (name, sock) = Supervisor(), listen()
    listener = WorkerListener(sock, supervisor, workforce)
    listener.open()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(socket_address(name))
        supervisor.turn(20)
        stranger.sendall(hello)
        while not select.select([stranger], [], [], 0)[0]:
            supervisor.turn(20)
        assert stranger.recv(1) == b""
    assert worker.channel is None
    listener.close()


def test_a_line_without_an_end_is_not_kept(monkeypatch):
    monkeypatch.setattr("ft.net.channel._LONGEST", 1 << 20)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        theirs.setblocking(False)
        theirs.send(b"a line\n")
        assert channel.receive() == [b"a line"]
        while not channel.gone:
            theirs.send(b"x" * 65536)
            channel.receive()
    assert not channel._in


@pytest.mark.parametrize(("hard", "raised"), [(4096, "True (1500, 4096)"), (1200, "False (1200, 1200)")])
def test_the_limit_of_open_files_is_raised_as_far_as_the_hard_one_allows(hard, raised):
    code = f"import resource as r; from ft.platform import processes as p; r.setrlimit(r.RLIMIT_NOFILE, (1024, {hard}))"
    code += "; print(p.allow_files(1500), r.getrlimit(r.RLIMIT_NOFILE), end='')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == raised
