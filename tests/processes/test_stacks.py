"""Stacks of processes that cannot run Python code, and processes that must not get the signal for them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from waiting import eventually

from ft.faults.hang import inspection as calls
from ft.faults.hang.format import where
from ft.faults.hang.inspection import RUNNING, Rank
from ft.job.agent.inspections import Inspections
from ft.job.messages import Inspect
from ft.platform import processes
from ft.platform.processes import Handler
from ft.record import inspections

BEGIN = """
import ctypes, dataclasses, json, os, signal, sys, threading, time
from ft.platform import processes
def say(handler):
    print(json.dumps(dataclasses.asdict(handler)), flush=True)
"""
REGISTER = "handler = processes.register_handler(threading.main_thread().ident)\n"
HOLD = """
def hold():
    usleep = ctypes.PyDLL(None).usleep
    say(handler)
    while True:
        usleep(ctypes.c_uint(1_000_000))
"""


@pytest.fixture
def start():
    """Return a function that starts a program, and returns its process and the handler that it describes."""
    started = []

    def begin(program: str) -> tuple[subprocess.Popen, Handler]:
        process = subprocess.Popen([sys.executable, "-c", BEGIN + program], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, Handler.of(json.loads(process.stdout.readline()))

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def asked(process: subprocess.Popen, handler: Handler) -> str:
    """Return the stacks of a process; it has to survive."""
    found = processes.stacks_of({"it": (process.pid, handler)})
    time.sleep(0.05)
    assert process.poll() is None, "the process was killed"
    return found.get("it", "")


def within(function: str, threads: list, at_least: int = 1) -> list:
    """Return the threads if the first is in a function, and there are as many as asked for; otherwise, nothing.

    On a busy machine, the first may still be in ``say``, and another may not write in the time that it is given.
    """
    return threads if len(threads) >= at_least and threads[0].frames[0].endswith(f" {function}") else []


def test_who_holds_the_interpreter_lock_in_c_shows_its_line(start):
    process, handler = start(REGISTER + HOLD + "threading.Thread(target=time.sleep, args=(60,)).start()\nhold()\n")
    for _ in range(2):  # each time, it is what was written last
        threads = eventually(lambda: within("hold", calls.read_stacks(asked(process, handler), handler.thread), 2))
        assert [thread.trains for thread in threads] == [True, False], threads
        assert threads[0].name == "MainThread", threads


def test_an_agent_puts_the_calls_into_the_inspection(start, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LIMIT_S", 20.0)  # a process that gets no CPU writes late
    process, handler = start(REGISTER + HOLD + "hold()\n")
    eventually(lambda: within("hold", calls.read_stacks(asked(process, handler), handler.thread)))
    kept = Inspections(tmp_path, "n0")
    kept.begins(Inspect(1, "a stall", {0: "n0.w0"}), {"n0.w0": process.pid}, {"n0.w0": handler})
    eventually(lambda: kept.poll() or inspections.numbers(tmp_path))
    kept.close()
    said: Rank = inspections.read(tmp_path, 1).ranks[0]
    assert (said.process, said.answers) == (RUNNING, False), said
    assert said.training.frames[0].endswith(" hold") and said.training.kernel, said
    assert " hold" in where(said)
    assert process.poll() is None


NEVER = {
    "no handler": "fd = os.memfd_create('ft-stacks')\nsay(processes.Handler(50, 49, fd, 1))\ntime.sleep(60)\n",
    "another handler and no file": "signal.signal(50, lambda *_: os._exit(3))\nsay(processes.Handler(50, 49, 0, 1))\n"
    "time.sleep(60)\n",
    "the file is closed": REGISTER + "os.close(handler.fd)\nsay(handler)\ntime.sleep(60)\n",
    "the descriptor is another file's": REGISTER
    + "os.dup2(os.open('/dev/null', os.O_WRONLY), handler.fd)\nsay(handler)\ntime.sleep(60)\n",
}


@pytest.mark.parametrize("program", NEVER.values(), ids=NEVER)
def test_who_has_not_registered_is_never_signalled(start, program):
    process, handler = start(program)
    assert asked(process, handler) == ""
    assert "50" not in _pending(process.pid)


def _pending(pid: int) -> str:
    with open(f"/proc/{pid}/status") as file:
        masks = [line for line in file if line.startswith(("SigPnd", "ShdPnd"))]
    return " ".join(str(n) for line in masks for n in range(1, 65) if int(line.split()[1], 16) >> (n - 1) & 1)


COMES_AND_GOES = """
def spawn():
    while True:
        thread = threading.Thread(target=len, args=("",))
        thread.start()
        thread.join()
for _ in range(2):
    threading.Thread(target=spawn, daemon=True).start()
def wait():
    say(handler)
    while True: time.sleep(0.02)
"""


def test_a_process_that_was_only_slow_survives_although_its_threads_come_and_go(start):
    """A handler that writes the calls of all threads reads what these free: 20 signals ended this process."""
    process, handler = start(REGISTER + COMES_AND_GOES + "wait()\n")
    stacks = [calls.read_stacks(asked(process, handler), handler.thread) for _ in range(40)]  # it survives them
    assert any(frame.endswith(" wait") for threads in stacks for thread in threads[:1] for frame in thread.frames)


def test_a_stopped_process_is_left_alone(start):
    process, handler = start(REGISTER + HOLD + "hold()\n")
    os.kill(process.pid, signal.SIGSTOP)
    while processes.state(process.pid) != "T":
        time.sleep(0.01)
    assert asked(process, handler) == "" and not _pending(process.pid)


def test_a_program_keeps_its_own_handlers(start):
    own = "signal.signal(50, lambda *_: os._exit(3))\nsignal.signal(49, signal.SIG_IGN)\n"
    process, handler = start(own + REGISTER + "say(handler)\nwhile True: time.sleep(0.1)\n")
    assert (handler.signum, handler.everybody) == (48, 47)
    assert eventually(lambda: "<module>" in asked(process, handler))


def test_children_have_files_of_their_own_or_none(start):
    fork = "if os.fork() == 0:\n    handler = processes.register_handler(threading.main_thread().ident)\n"
    loop = "def of_child():\n    while True: time.sleep(0.1)\ndef of_parent():\n    while True: time.sleep(0.1)\n"
    process, handler = start(
        REGISTER + loop + fork + "    of_child()\nos.set_inheritable(1, True)\nsay(handler)\nof_parent()\n"
    )
    (child,) = processes.children(process.pid)
    text = eventually(lambda: " of_parent" in (text := asked(process, handler)) and text)  # it may still be in ``say``
    assert " of_child" not in text
    # the descriptors of the child are those of the parent's file and of its own
    mine = Handler(handler.signum, handler.everybody, handler.fd + 1, handler.thread)
    text = eventually(
        lambda: " of_child" in (text := processes.stacks_of({"it": (child, mine)}).get("it", "")) and text
    )
    assert " of_parent" not in text
    assert processes.state(child) not in "ZX"
    os.kill(child, signal.SIGKILL)


def test_it_is_registered_once_in_a_process():
    first = processes.register_handler(1)
    assert first is not None and processes.register_handler(1) is first
    assert Handler.of(None) is None and Handler.of({"signum": "x"}) is None
