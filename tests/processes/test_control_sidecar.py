"""The control plane's I/O: the control channel between real processes, the journal, the side-car's process."""

import contextlib
import json
import subprocess
import sys
import threading
from queue import Queue

import psutil
import pytest
from control_world import World
from pythons import environment
from waiting import eventually

from ft.base import events
from ft.job import messages as m
from ft.job.control import journal
from ft.job.control.channel import AgentChannel, ControlChannel
from ft.job.control.journal import Journal, recall
from ft.job.control.state import RUNNING
from ft.job.parts import Holdings, Source

LIMIT_S = 30.0
TOKEN = "the token of the test"


def follow(channel, seen):
    with contextlib.suppress(ConnectionError):  # the end of the control plane, with that of the test
        channel.follow(lambda number, order: seen.put(order), 0)


def recorded(path, **how) -> World:
    """Return a world that trains, and whose control plane has written its journal there."""
    world = World(**how)
    world.journal = Journal(path, world.options)
    return world.run()


def without_beats(state):
    for agent in state.agents.values():
        agent.beats, agent.heard_at = {}, 0.0
    return state


def test_how_long_a_device_is_waited_for_can_be_derived_from_the_journal(tmp_path):
    """It is not in the heartbeats of which the journal has only the last, but in the decision on a silence."""
    world = recorded(tmp_path / "journal.jsonl", standbys=2, nodes=2, devices=4)
    world.kill(0)
    lost_at = world.now
    world.wait(4)  # heartbeats without a decision: to a reader of the journal a gap
    world.say(m.Observed("layout", {}))
    world.wait(2, beats=["n1"])
    silent_s = world.now - world.state.agents["n0"].heard_at
    world.wait(2)
    known = recall(tmp_path / "journal.jsonl").state
    (hold,) = world.state.agents["n0"].held.values()
    assert hold.since == pytest.approx(lost_at + silent_s, abs=0.5)
    assert without_beats(known) == without_beats(world.state)
    reports = [entry.get("report") for entry in journal.read(tmp_path / "journal.jsonl")]
    assert 0 < sum(isinstance(report, m.AgentBeat) for report in reports) < 10, "it has few of the heartbeats"


def test_what_a_control_plane_that_has_died_wrote_is_over(tmp_path):
    for restarts in (0, 1):
        world = recorded(tmp_path / "journal.jsonl", restarts=restarts)
        assert len(world.events("run_started")) == 1 - restarts
    state = recall(tmp_path / "journal.jsonl").state
    assert state.restarts == 1 and without_beats(state) == without_beats(world.state)


def test_a_torn_line_is_left_out(tmp_path):
    recorded(tmp_path / "journal.jsonl")
    with open(tmp_path / "journal.jsonl", "a") as file:
        file.write('{"now": 5, "repo')
    memory = recall(tmp_path / "journal.jsonl")
    assert memory.state.phase == RUNNING and not memory.damaged
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(ValueError, match="is no journal"):
        recall(tmp_path / "other")


@pytest.mark.parametrize(
    "line",
    [
        *("5", "null", "[]", '"known"', "{", "[" * 200_000, '{"now": 5}', '{"now": 1e400, "report": null}'),
        *('{"now": 5, "report": {"kind": "WorkerExited"}}', '{"now": 5, "report": {"kind": ["x"]}}'),
        *('{"known": "all", "term": 9}', '{"now": 5, "report": null, "number": 3}', '{"options": {}}'),
    ],
    ids=lambda line: line[:40],
)
def test_a_damaged_line_is_skipped_and_counted(line, tmp_path):
    path = tmp_path / "journal.jsonl"
    world = recorded(path, standbys=2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], line.encode() + b"\n", *lines[3:]]))
    memory = recall(path)
    assert memory.damaged == 1 and journal.lives(path) == 1
    assert without_beats(memory.state) == without_beats(world.state)


def test_a_journal_whose_later_decisions_need_a_damaged_line_is_refused(tmp_path):
    path = tmp_path / "journal.jsonl"
    world = recorded(path, standbys=2)
    world.kill(3)
    world.recover(6)
    lines = path.read_bytes().splitlines(keepends=True)
    for at, line in enumerate(lines):
        if b'"first":' in line:
            path.write_bytes(b"".join([*lines[:at], b"\0" * 80 + b"\n", *lines[at + 1 :]]))
            if at < max(number for number, line in enumerate(lines) if b'"first":' in line):
                with pytest.raises(ValueError, match="1 damaged line"):
                    recall(path)
            else:
                assert recall(path).damaged == 1


def test_what_a_control_plane_that_was_succeeded_writes_late_is_no_part_of_the_history(tmp_path):
    """It was paused, and finds its successor only when it has written once more."""
    path = tmp_path / "journal.jsonl"
    first, known = (recorded(tmp_path / f"{name}.jsonl", standbys=2) for name in ("all", "known"))
    path.write_bytes((tmp_path / "all.jsonl").read_bytes())
    memory = recall(path)
    first.kill(3)  # written by the first one after its successor has read
    path.write_bytes((tmp_path / "all.jsonl").read_bytes())
    second = Journal(path, None, term=1, memory=memory)
    second.enter(memory.now + 1.0, memory.wall + 1.0, None, [])
    assert without_beats(recall(path).state) == without_beats(known.state)
    with open(path, "ab") as file:  # and after it has written
        file.write((tmp_path / "all.jsonl").read_bytes()[memory.bytes :])
    assert without_beats(recall(path).state) == without_beats(known.state)


def sidecar(folder, log, options, where="tcp://127.0.0.1:0", **given) -> subprocess.Popen:
    """Start a side-car of the run in ``folder``."""
    asked = json.dumps({"run_dir": str(folder), "where": where, "options": {"nodes": 1, **options}, **given})
    command = [sys.executable, "-m", "ft.job.control"]
    how = {"env": environment(FT_TOKEN=TOKEN), "stdout": log, "stderr": log, "stdin": subprocess.PIPE}
    child = subprocess.Popen(command, **how)
    child.stdin.write(asked.encode())
    child.stdin.close()
    return child


class Played:
    """A side-car, and an agent with its workers played by the test."""

    def __init__(self, folder, world_size=2):
        self.folder = folder
        self.log = open(folder / "control.log", "wb")  # noqa: SIM115 - closed with the side-car
        options = {"world_size": world_size, "nodes": 1, "command": ["train.py"]}
        self.process = sidecar(folder, self.log, options)
        where = self.await_file("control.json")["where"]
        self.channel = AgentChannel(where, "n0", TOKEN, LIMIT_S)
        self.orders, self.number = Queue(), 0
        threading.Thread(target=follow, args=(self.channel, self.orders), daemon=True).start()

    def await_file(self, name):
        def is_there():
            assert self.process.poll() is None, (self.folder / "control.log").read_text()
            return (self.folder / name).exists()

        eventually(is_there, f"no {name}")
        return json.loads((self.folder / name).read_text())

    def say(self, *reports):
        for report in reports:
            self.number += 1
            self.channel.post(self.number, report)

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

    def lose_a_worker(self):
        """Have logical rank 1 killed, and return the epoch that is opened with the standby in its place."""
        self.say(m.WorkerExited("n0.w1", "n0", -9, True))
        assert self.hear(m.Close).epoch == 0
        opened = self.hear(m.Open)
        assert opened.joiners == [1]
        self.say(m.WorkerReleased("n0.w0", 0, 7, [], Holdings([7], {1: [7]})))
        return opened

    def go_on(self):
        """Repair the state once the standby has arrived, and train to the end."""
        assert self.hear(m.Repair).sources[1] == Source(0, 0)
        self.say(repaired("n0.w0", 0, "own"), repaired("n0.w2", 1, "copy:0"))
        assert self.hear(m.Resume) == m.Resume(1, 7)
        self.say(m.WorkerResumed("n0.w0", 1, 7), m.WorkerResumed("n0.w2", 1, 7))
        assert self.hear(m.Spawn) == m.Spawn("n0", 1)
        self.say(m.Observed("nonsense", {}), m.WorkerDone("n0.w0", 1, 9), m.WorkerDone("n0.w2", 1, 9))
        self.hear(m.Finish)
        self.say(m.AgentLeaving("n0", 0))
        assert self.process.wait(LIMIT_S) == 0

    def train_with_a_fault(self):
        """Say that the workers train, and that a fault was injected."""
        beats = {f"n0.w{rank}": m.Beat(0.0, 0, 7, "compute", 0.1, "step 8", 0.1, 1) for rank in range(2)}
        self.say(m.AgentBeat("n0", beats), m.Observed("fault_injected", {"node": "n0", "number": 1, "kind": "kill"}))

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
    played.train_with_a_fault()
    opened = played.lose_a_worker()
    assert opened.seats[1].worker == "n0.w2" and opened.fired == [1]
    played.say(m.WorkerArrived("n0.w2", 1))
    played.go_on()
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
    assert recall(folder / "journal.jsonl").state.epoch == 1
    assert (folder / "control.log").read_text() == ""


def test_the_side_car_notices_by_itself_that_time_has_passed(played):
    played.start()
    played.say(m.WorkerSuspects("n0.w0", 0, "world", "Connection reset"))
    assert played.hear(m.Inspect).seats == {0: "n0.w0", 1: "n0.w1"}
    assert played.hear(m.Close).reason.endswith("nobody has died")
    assert played.hear(m.Open).joiners == []


def test_the_side_car_dies_with_its_parent(tmp_path):
    given = {"run_dir": str(tmp_path), "where": "tcp://127.0.0.1:0", "options": {"nodes": 1, "world_size": 1}}
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "ft.job.control"], stdin=subprocess.PIPE)
child.communicate({json.dumps(given).encode()!r}, timeout=100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment(FT_TOKEN=TOKEN))
    eventually((tmp_path / "control.json").exists)
    child = psutil.Process(json.loads((tmp_path / "control.json").read_text())["pid"])
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=LIMIT_S)
    assert not child.is_running()


def test_a_port_that_is_taken_ends_the_side_car_with_a_message(tmp_path):
    channel = ControlChannel("tcp://127.0.0.1:0", TOKEN)
    with open(tmp_path / "log", "wb") as log:
        done = sidecar(tmp_path, log, {"world_size": 1}, channel.where)
    assert done.wait(LIMIT_S) == 2 and "cannot be listened on" in (tmp_path / "log").read_text()
