"""A worker's waits as an inspection finds them, and the operations of a step that it remembers.

Its protocol with the control plane is in ``conversations/worker``, its heartbeats in ``conversations/heartbeats``, and
the comparison of steps in ``conversations/steps``.
"""

import asyncio
import gc
import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from worker_conversations import start

from ft.faults.hang.format import is_in_own_wait
from ft.faults.hang.inspection import Rank
from ft.job.messages import Finish
from ft.state.groups import history
from ft.worker import protocol
from ft.worker.progress import Heartbeat, Progress
from ft.worker.protocol import Orders
from ft.worker.session import Session, running_threads


def test_a_heartbeat_whose_description_fails_is_followed_by_others(capsys):
    said, progress = queue.SimpleQueue(), Progress()

    def lag():
        progress.lag = lambda: 3
        raise RuntimeError("nobody can say")

    progress.lag = lag
    beats = Heartbeat(progress, said.put, period_s=0.001)
    assert said.get(timeout=60).lag == 3 and "nobody can say" in capsys.readouterr().err
    beats.close()


def test_of_a_step_with_many_operations_the_newest_are_remembered(monkeypatch):
    monkeypatch.setattr(history, "_MOST", 4)
    kept = history.History()
    start(kept, "abcdefgh")
    gc.collect()
    pending = kept.operations(lambda entry: (entry.group != "h", entry.group == "h"))
    assert [one.group for one in pending if not one.done] == ["h"]
    kept.begins()
    assert "h" not in {one.group for one in kept.operations(lambda entry: (True, False))}


def test_a_suspended_coroutine_is_an_error_outside_of_a_simulation():
    with pytest.raises(RuntimeError, match="outside of a simulation"):
        protocol.run(asyncio.sleep(0))


def waits(name):
    """Return whether an inspection finds the thread in a wait of this project, as if it was a rank's training
    thread."""
    one = next(thread for thread in running_threads() if thread.name == name)
    return is_in_own_wait(Rank(0, threads=(replace(one, trains=True),)))


def test_an_inspection_knows_who_waits_for_a_verdict_and_who_waits_for_an_order():
    left, orders = threading.Event(), Orders(lambda order: None)
    member = SimpleNamespace(_left=left, worker="n0.w0", epoch=1, send=lambda report: None)
    member.wait_closed = lambda within_s: Session.wait_closed(member, within_s)
    member.timeouts = SimpleNamespace(verdict_s=60.0)
    suspects = threading.Thread(target=Session.suspect, args=(member, "dp", OSError()), name="suspects", daemon=True)
    awaits = threading.Thread(target=orders.next, args=(60.0,), name="awaits", daemon=True)
    try:
        for thread in (suspects, awaits):
            thread.start()
            until = time.monotonic() + 120
            while not waits(thread.name):
                assert time.monotonic() < until and thread.is_alive()
                time.sleep(0.01)
    finally:
        left.set()
        orders.deliver(Finish())
        suspects.join(60.0)
        awaits.join(60.0)
