"""The control plane's I/O: the board between real processes, the journal, the side-car's process."""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Queue

import psutil
import pytest
from control_world import World

from ft import events
from ft import messages as m
from ft.control import journal
from ft.control.board import KEPT_ORDERS, Board
from ft.control.journal import Journal, rebuild
from ft.control.sidecar import parse_options
from ft.control.state import RUNNING
from ft.errors import UserError

ROOT = Path(__file__).parent.parent
LIMIT_S = 30.0
ROUNDS = 50


# --- board -----------------------------------------------------------------------------------------------------------


def answer(port):
    """Posts when each order came, until the last one."""
    board = Board.connect("127.0.0.1", port)

    def obey(order):
        board.post(m.Observed("order", {"order": order.reason, "at": time.monotonic()}))
        if order.epoch == ROUNDS - 1:
            raise StopIteration

    board.post(m.AgentLeaving("n0", 0))
    with contextlib.suppress(StopIteration):
        board.follow(obey)


def follow(board, seen):
    with contextlib.suppress(RuntimeError):  # the end of the store, with that of the test
        board.follow(seen.put)


def test_reports_and_orders_between_processes(ranks):
    board = Board.host("127.0.0.1", 0)
    handle = ranks.start(answer, 1, board.port, init=False)
    assert board.receive(LIMIT_S) == m.AgentLeaving("n0", 0)
    there, back = [], []
    for i in range(ROUNDS):
        sent = time.monotonic()
        board.publish(m.Close(i, str(i)))
        report = board.receive(LIMIT_S)
        came = time.monotonic()
        assert report.detail["order"] == str(i)
        there.append(report.detail["at"] - sent)
        back.append(came - report.detail["at"])
    print(f"order {1e3 * statistics.median(there):.2f} ms, report {1e3 * statistics.median(back):.2f} ms")
    assert [outcome.exitcode for outcome in handle.wait(timeout=LIMIT_S)] == [0]


def wait_without_end(port):
    print("waiting", flush=True)
    Board.connect("127.0.0.1", port).follow(print)


def test_a_reader_that_is_killed_and_one_that_waits_hold_up_nobody(ranks):
    board = Board.host("127.0.0.1", 0)
    handle = ranks.start(wait_without_end, 2, board.port, init=False)
    for rank in range(2):
        handle.wait_for_output(rank, "waiting")
    handle.kill(0, signal.SIGKILL)
    other = Board.connect("127.0.0.1", board.port)
    other.post(m.AgentLeaving("n1", 9))
    assert board.receive(LIMIT_S) == m.AgentLeaving("n1", 9)
    board.publish(m.Finish())
    handle.wait_for_output(1, "Finish()")
    handle.close()


def test_receiving_ends_in_time_and_loses_nothing():
    board = Board.host("127.0.0.1", 0)
    agent = Board.connect("127.0.0.1", board.port)
    for _ in range(3):
        assert board.receive(0.01) is None
    for i in range(100):
        agent.post(m.AgentLeaving("n0", i))
    assert [board.receive(LIMIT_S).signum for _ in range(100)] == list(range(100))


def test_what_is_no_report_is_passed_over():
    board = Board.host("127.0.0.1", 0)
    board.store.queue_push("control/inbox", "{")
    board.post(m.AgentLeaving("n0", 1))
    assert board.receive(LIMIT_S) == m.AgentLeaving("n0", 1)


def test_old_orders_are_removed_and_a_late_follower_begins_with_the_oldest():
    board = Board.host("127.0.0.1", 0)
    before = board.store.num_keys()
    for i in range(KEPT_ORDERS + 50):
        board.publish(m.Close(i, ""))
    assert board.store.num_keys() <= before + KEPT_ORDERS
    seen = Queue()
    late = Board.connect("127.0.0.1", board.port)
    threading.Thread(target=follow, args=(late, seen), daemon=True).start()
    numbers = [seen.get(timeout=LIMIT_S).epoch for _ in range(KEPT_ORDERS)]
    assert numbers == list(range(50, KEPT_ORDERS + 50))


def test_a_port_that_is_taken():
    board = Board.host("127.0.0.1", 0)
    with pytest.raises(UserError, match=f"port {board.port} on 127.0.0.1 cannot be listened on"):
        Board.host("127.0.0.1", board.port)


# --- journal ---------------------------------------------------------------------------------------------------------


def without_beats(state):
    for agent in state.agents.values():
        agent.beats, agent.heard_at = {}, 0.0
    return state


def test_the_state_can_be_derived_from_the_journal(tmp_path):
    world = World(standbys=2)
    world.journal = Journal(tmp_path / "journal.jsonl", world.options)
    world.run()
    world.wait(3)
    world.beat(6, r1={"doing": "wait", "since_s": 12.0}, r2={"since_s": 11.0})
    world.wait(1)
    world.recover(6)
    world.kill(0)
    world.release(1)
    assert without_beats(rebuild(tmp_path / "journal.jsonl")) == without_beats(world.state)
    entries = journal.read(tmp_path / "journal.jsonl")
    beats = [entry for entry in entries if (entry.get("report") or {}).get("kind") == "AgentBeat"]
    assert 0 < len(beats) < 10


def test_what_a_control_plane_that_has_died_wrote_is_over(tmp_path):
    for restarts in (0, 1):
        world = World(restarts=restarts)
        world.journal = Journal(tmp_path / "journal.jsonl", world.options)
        world.run()
        assert len(world.events("run_started")) == 1 - restarts
    state = rebuild(tmp_path / "journal.jsonl")
    assert state.restarts == 1 and without_beats(state) == without_beats(world.state)


def test_a_torn_line_is_left_out(tmp_path):
    world = World()
    world.journal = Journal(tmp_path / "journal.jsonl", world.options)
    world.run()
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"now": 5, "repo')
    assert rebuild(tmp_path / "journal.jsonl").phase == RUNNING
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(ValueError, match="is no journal"):
        rebuild(tmp_path / "other")


# --- side-car --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "cannot be read"),
        ("{}", "world_size"),
        ('{"world_size": 2, "timeouts": {"silent_s": 0.1}}', "silent_s"),
        ('{"world_size": 2, "timeouts": {"patience": 1}}', "patience"),
    ],
)
def test_options_that_cannot_work(text, words):
    with pytest.raises(UserError, match=words):
        parse_options(text)


def test_options():
    options = parse_options('{"world_size": 2, "run_id": "x", "timeouts": {"join_s": 900.0}, "hot_swap": false}')
    assert (options.world_size, options.nodes, options.hot_swap, options.timeouts.join_s) == (2, 1, False, 900.0)


class Played:
    """A side-car, and an agent with its workers played by the test."""

    def __init__(self, folder, world_size=2):
        self.folder = folder
        self.log = open(folder / "control.log", "wb")  # noqa: SIM115 - closed with the side-car
        options = {"world_size": world_size, "nodes": 1, "command": ["train.py"]}
        command = [sys.executable, "-m", "ft.control", "--run-dir", str(folder), "--host", "127.0.0.1"]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--options", json.dumps(options)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=self.log,
        )
        address = self.await_file("control.json")
        self.board = Board.connect(address["host"], address["port"], timeout_s=LIMIT_S)
        self.orders = Queue()
        follower = Board.connect("127.0.0.1", self.board.port)
        threading.Thread(target=follow, args=(follower, self.orders), daemon=True).start()

    def await_file(self, name):
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / name).exists():
            assert self.process.poll() is None, (self.folder / "control.log").read_text()
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.01)
        return json.loads((self.folder / name).read_text())

    def say(self, *reports):
        for report in reports:
            self.board.post(report)

    def hear(self, kind):
        order = self.orders.get(timeout=LIMIT_S)
        assert isinstance(order, kind), order
        return order

    def start(self):
        self.say(m.AgentJoined("n0", 0, "127.0.0.1", 2, 1))
        for rank in range(2):
            self.say(m.WorkerStarted(f"n0.w{rank}", "n0", 10 + rank, rank), m.WorkerReady(f"n0.w{rank}", "n0", "a:1"))
        assert self.hear(m.Open).fresh
        for rank in range(2):
            layout = {"dp_peers": {str(rank): [0, 1]}, "shards": {str(rank): [f"shard {rank}"]}}
            self.say(m.Observed("layout", layout), m.WorkerResumed(f"n0.w{rank}", 0, 0))
        assert self.hear(m.Spawn) == m.Spawn("n0", 1)
        self.say(m.WorkerStarted("n0.w2", "n0", 12, None), m.WorkerReady("n0.w2", "n0", "a:2"))

    def close(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def played(tmp_path):
    playing = Played(tmp_path)
    yield playing
    playing.close()


def repaired(worker, rank, how):
    shards, sources = [f"shard {rank}"], {"owned": how, "replicated": how}
    return m.WorkerRepaired(worker, 1, rank, 7, "topology", shards, 1, 0, 0, sources, 0.01, 0.01)


def test_a_whole_recovery_and_what_is_on_record_of_it(played, tmp_path):
    played.start()
    beats = {f"n0.w{rank}": m.Beat(0.0, 0, 7, "compute", 0.1, "step 8", 0.1, 1) for rank in range(2)}
    played.say(m.AgentBeat("n0", beats), m.Observed("fault_injected", {"node": "n0", "number": 1, "kind": "kill"}))
    played.say(m.WorkerExited("n0.w1", "n0", -9, True))
    assert played.hear(m.Close).epoch == 0
    opened = played.hear(m.Open)
    assert opened.joiners == [1] and opened.seats["1"].worker == "n0.w2" and opened.fired == [1]
    played.say(m.WorkerReleased("n0.w0", 0, 7, [], m.Holdings([7], {"1": [7]})), m.WorkerArrived("n0.w2", 1))
    assert played.hear(m.Repair).sources["1"] == m.Source(0, 0)
    played.say(repaired("n0.w0", 0, "own"), repaired("n0.w2", 1, "copy:0"))
    assert played.hear(m.Resume) == m.Resume(1, 7)
    played.say(m.WorkerResumed("n0.w0", 1, 7), m.WorkerResumed("n0.w2", 1, 7))
    assert played.hear(m.Spawn) == m.Spawn("n0", 1)
    played.say(m.Observed("nonsense", {}), m.WorkerDone("n0.w0", 1, 9), m.WorkerDone("n0.w2", 1, 9))
    played.hear(m.Finish)
    played.say(m.AgentLeaving("n0", 0))
    assert played.process.wait(LIMIT_S) == 0
    check_record(tmp_path)


def check_record(folder):
    found = events.read(folder / "events.jsonl")
    names = [event.name for event in found]
    recovery = ["fault_injected", "fault_detected", "worker_lost", "epoch_closed", "epoch_opened", "released"]
    recovery += [
        "joiner_arrived",
        "repair_ordered",
        "groups_rebuilt",
        "state_restored",
        "invariants_checked",
        "resumed",
    ]
    first = names.index("fault_injected")
    assert names[first : first + len(recovery)] == recovery
    assert names[0] == "run_started" and names[-1] == "finished"
    assert [event.monotonic for event in found[first:]] == sorted(event.monotonic for event in found[first:])
    status = json.loads((folder / "status.json").read_text())
    assert (status["phase"], status["epoch"], status["step"], status["restarts"]) == ("ended", 1, 9, 0)
    assert status["seats"]["1"]["worker"] == "n0.w2" and status["last_recovery"]["closed"] == 0
    entries = journal.read(folder / "journal.jsonl")
    decisions = [decision for entry in entries for decision in entry.get("decisions", [])]
    assert all(decision["reason"] for decision in decisions)
    ordered = [order["kind"] for decision in decisions for order in decision.get("orders", [])]
    assert ordered == ["Open", "Spawn", "Close", "Open", "Repair", "Resume", "Spawn", "Finish"]
    assert any("no event is named 'nonsense'" in entry.get("remark", "") for entry in entries)
    assert rebuild(folder / "journal.jsonl").epoch == 1
    assert (folder / "control.log").read_text() == ""


def test_the_side_car_notices_by_itself_that_time_has_passed(played):
    played.start()
    played.say(m.WorkerSuspects("n0.w0", 0, "world", "Connection reset"))
    assert played.hear(m.Close).reason.endswith("nobody has died")
    assert played.hear(m.Open).joiners == []


def test_the_side_car_dies_with_its_parent(tmp_path):
    options = json.dumps({"world_size": 1})
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "ft.control", "--run-dir", {str(tmp_path)!r}, "--host", "127.0.0.1",
                  "--port", "0", "--options", {options!r}])
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "control.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child = psutil.Process(json.loads((tmp_path / "control.json").read_text())["pid"])
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=LIMIT_S)
    assert not child.is_running()


def test_a_port_that_is_taken_ends_the_side_car_with_a_message(tmp_path):
    board = Board.host("127.0.0.1", 0)
    command = [sys.executable, "-m", "ft.control", "--run-dir", str(tmp_path), "--host", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--port", str(board.port), "--options", '{"world_size": 1}'],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2 and "cannot be listened on" in done.stderr and done.stdout == ""
