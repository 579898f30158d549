"""Faults that workers and agents do to themselves: in the right place, once, and announced before."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import processes
from pythons import environment
from waiting import eventually

from ft.base.errors import RecoverableError
from ft.faults import Fault, write
from ft.faults.agent import AgentInjector
from ft.faults.worker import Injector
from ft.platform import election

LIMIT_S = 120.0


def filed(folder: Path, *faults: Fault) -> str:
    """What FT_FAULTS is for these faults."""
    write(folder / "faults.json", faults)
    return str(folder / "faults.json")


class Diary:
    """What an injector announces and does, in order."""

    def __init__(self):
        self.entries = []

    def announce(self, fault: Fault) -> None:
        self.entries.append(("announced", fault.number))

    def act(self, fault: Fault) -> None:
        self.entries.append("dropped" if fault.kind == "drop" else f"corrupted {fault.copies}")


def injector(*faults: Fault, began=None) -> tuple[Injector, Diary]:
    diary = Diary()
    return Injector(faults, 3, "n1", (), diary.announce, diary, began), diary


def test_an_exception_by_the_clock_is_raised_at_the_next_point_of_the_training_thread():
    hurt, diary = injector(Fault(5, "exception", time=0.0, rank=3))
    eventually(lambda: diary.entries, "announcement")
    hurt.close()
    hurt.at("transfer", 1)
    with pytest.raises(RecoverableError):
        hurt.at("forward", 1)
    hurt.at("forward", 1)


def test_faults_by_the_clock_come_in_the_order_of_their_times():
    hurt, diary = injector(Fault(2, "drop", time=0.06, rank=3), Fault(1, "corrupt-snapshot", time=0.02, rank=3))
    eventually(lambda: len(diary.entries) == 4, "second fault")
    assert diary.entries == [("announced", 1), "corrupted own", ("announced", 2), "dropped"]
    hurt.close()


def test_a_fault_that_is_overdue_comes_at_once_and_one_far_off_can_be_called_off():
    hurt, diary = injector(
        Fault(1, "drop", time=60.0, rank=3), Fault(2, "drop", time=9000.0, rank=3), began=time.time() - 100
    )
    eventually(lambda: len(diary.entries) == 2, "overdue fault")
    hurt.close()
    assert diary.entries == [("announced", 1), "dropped"]


WORKER = """
import sys, time
from ft.faults.worker import MOST_SLEEP_S, Injector
injector = Injector.from_environment(3, "n0", [], lambda fault: print("announced", fault.number, flush=True), None)
for step in range(1, 10):
    injector.at("between", step)
    print("step", step, flush=True)
while "--wait" in sys.argv:
    time.sleep(0.01)
print("end", flush=True)
"""


def start(code: str, *arguments: str, **more: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=environment(**more), stdout=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen) -> tuple[int, list[str]]:
    out = process.communicate(timeout=LIMIT_S)[0]
    return process.returncode, out.splitlines()


def test_a_kill_is_announced_and_is_a_sigkill(tmp_path):
    code, lines = ended(start(WORKER, FT_FAULTS=filed(tmp_path, Fault(4, "kill", step=3, rank=3))))
    assert code == -signal.SIGKILL
    assert lines == ["step 1", "step 2", "announced 4"]


def test_a_kill_by_the_clock_counts_from_where_training_began(tmp_path):
    faults = filed(tmp_path, Fault(4, "kill", time=50.0, rank=3))
    code, lines = ended(start(WORKER, "--wait", FT_FAULTS=faults, FT_BEGAN=str(time.time() - 49.7)))
    assert code == -signal.SIGKILL
    assert "announced" in "".join(lines)  # the thread of the clock may print into a line of the other


def test_a_hang_stops_the_process_and_ends_by_itself_when_asked_to(tmp_path):
    process = start(WORKER, FT_FAULTS=filed(tmp_path, Fault(4, "hang", step=3, rank=3, seconds=15)))
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "stopped process")
    code, lines = ended(process)
    assert code == 0
    assert lines[2:4] == ["announced 4", "step 3"]


def test_a_hung_worker_that_is_killed_leaves_nobody_behind(tmp_path):
    process = start(WORKER, FT_FAULTS=filed(tmp_path, Fault(4, "hang", step=3, rank=3, seconds=900)))
    eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "stopped process")
    below = psutil.Process(process.pid).children()
    assert len(below) == 1
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    eventually(lambda: not below[0].is_running() or below[0].status() == psutil.STATUS_ZOMBIE, "end of the helper")


def test_the_control_plane_is_killed_by_step_once(tmp_path):
    control = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    election.renew(tmp_path, election.LeaseRecord(0, 0, "tcp://h:1", "n0", control.pid))
    announced = []
    elsewhere = AgentInjector([Fault(1, "kill-control", step=5)], "n1", tmp_path, announced.append)
    elsewhere.progressed(5)
    agent = AgentInjector([Fault(1, "kill-control", step=5)], "n0", tmp_path, announced.append)
    agent.begin()
    for step in (0, 3, 4, 5):
        agent.progressed(step)
        if step < 4:
            assert control.poll() is None
    assert control.wait(LIMIT_S) == -signal.SIGKILL
    assert [fault.number for fault in announced] == [1]
    agent.close()


def test_the_control_plane_is_killed_by_the_clock_unless_it_has_been(tmp_path):
    announced = []
    election.renew(tmp_path, election.LeaseRecord(0, 0, "", "n0", 0))
    faults = [Fault(1, "kill-control", time=0.0), Fault(2, "kill-control", time=0.01)]
    agent = AgentInjector(faults, "n0", tmp_path, announced.append)
    agent.update([1])
    agent.begin()
    eventually(lambda: announced, "second fault")
    agent.close()
    assert [fault.number for fault in announced] == [2]


NODE = """
import subprocess, sys, time
from ft.faults import Fault
from ft.platform import election
from ft.faults.agent import AgentInjector
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
print(below.pid, flush=True)
fault = Fault(1, "kill", step=2, node="n1")
agent = AgentInjector([fault], "n1", ".", lambda fault: print("announced", flush=True))
agent.progressed(1)
print("alive", flush=True)
"""


def test_a_killed_node_takes_all_its_processes_with_it():
    code, lines = ended(start(NODE))
    assert code == -signal.SIGKILL
    assert lines[1:] == ["announced"]
    eventually(lambda: not processes.runs(int(lines[0])), "end")


PARTITION = """
import subprocess, sys, time
from ft.faults.agent import Outage, check_allowed, interfaces
run = lambda *words: subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
run("link", "add", "a0", "type", "veth", "peer", "name", "b0")
for name, address in (("a0", "10.77.1.1/24"), ("b0", "10.77.2.1/24")):
    run("address", "add", address, "dev", name)
    run("link", "set", name, "up")
run("route", "add", "10.88.0.0/16", "via", "10.77.1.9")
check_allowed()
print(sorted(interfaces()), flush=True)
outage = Outage(float(sys.argv[1]))
print(sorted(interfaces()), run("route", "show").strip(), flush=True)
if sys.argv[1] == "900":
    outage.end()
while len(interfaces()) < 2:
    time.sleep(0.01)
outage.end()
print(sorted(interfaces()), "10.88.0.0/16 via 10.77.1.9" in run("route", "show"), flush=True)
"""


@pytest.fixture
def namespace():
    """The name of a network namespace."""
    name = f"ft-test-{os.getpid()}"
    add = ["ip", "netns", "add", name]
    if shutil.which("ip") is None or subprocess.run(add, capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


@pytest.mark.parametrize("seconds", ["20", "900"])
def test_a_partition_takes_the_interfaces_down_and_gives_them_and_their_routes_back(seconds, namespace):
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable, "-c", PARTITION, seconds],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout.splitlines() == ["['a0', 'b0']", "[] ", "['a0', 'b0'] True"], done.stderr
