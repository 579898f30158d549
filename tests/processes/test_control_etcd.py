"""The control plane's process with its lease and journal on etcd, and an agent with its workers played by the test."""

import contextlib
import threading
import time
from collections import deque
from queue import Queue

import pytest
from test_control_sidecar import LIMIT_S, TOKEN, Played, sidecar
from waiting import eventually

from ft.job import messages as m
from ft.job.agent.uplink import Linked, ReportRefused, Uplink
from ft.job.control import journal
from ft.job.control.channel import AgentChannel
from ft.job.control.timeouts import BEHIND_ETCD, Timeouts
from ft.job.parts import Source
from ft.platform import election
from ft.platform.shared_state import keep_on_etcd


class OnEtcd(Played):
    """Keeps its reports until they are on record, as an agent does; each control plane is on another node."""

    def __init__(self, folder, url):
        self._nodes, self._url = folder, url
        self._term, self._next_order = -1, 0
        self._kept: deque[tuple[int, object]] = deque()
        self.orders, self.number = Queue(), 0
        self.log = open(folder / "control.log", "ab")  # noqa: SIM115 - closed with the process
        self.process = None
        self.begin()

    def begin(self):
        """Starts the control plane on the next node, for the next term, and connects to it."""
        self._term += 1
        self.folder = self._nodes / f"node{self._term}"
        self.folder.mkdir()
        keep_on_etcd(self.folder, self._url, "run", TOKEN)
        election.claim(self.folder, self._term, "n0")
        options = {"world_size": 2, "command": ["train.py"], "timeouts": BEHIND_ETCD | {"agent_lost_s": 19.0}}
        self.process = sidecar(self.folder, self.log, options, term=self._term)
        self.channel = AgentChannel(eventually(self._standing).where, "n0", TOKEN, LIMIT_S)
        taken = self.channel.taken()
        self._kept = deque(entry for entry in self._kept if entry[0] > taken)
        for number, report in self._kept:
            self.channel.post(number, report)
        threading.Thread(target=self._follow, daemon=True).start()

    def say(self, *reports):
        for report in reports:
            self.number += 1
            self._kept.append((self.number, report))
            with contextlib.suppress(ConnectionError):
                self.channel.post(self.number, report)

    def _standing(self):
        assert self.process.poll() is None, (self._nodes / "control.log").read_text()
        standing = election.read(self.folder)
        return standing if standing is not None and standing.term >= self._term else None

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def succeed_with_a_joiner(self):
        """Have another control plane take over, which is told that the standby has arrived."""
        self.kill()
        self.say(m.WorkerArrived("n0.w2", 1))
        self.begin()

    def decisions(self):
        return [
            decision["reason"]
            for entry in journal.read(self.folder / "journal.jsonl")
            for decision in entry.get("decisions", [])
        ]

    def _follow(self):
        def take(number, order):
            assert number == self._next_order, "lost, or twice"
            self._next_order += 1
            self.orders.put(order)

        with contextlib.suppress(ConnectionError):
            self.channel.follow(take, self._next_order)


@pytest.fixture
def played(tmp_path, etcd):
    servers = etcd(3)
    playing = OnEtcd(tmp_path, servers.url)
    yield playing, servers
    playing.channel.close()
    playing.close()


def test_a_recovery_goes_on_when_the_control_plane_and_a_server_are_killed(played, tmp_path):
    played, servers = played
    played.start()
    played.train_with_a_fault()
    servers.kill(servers.leader())
    played.lose_a_worker()
    played.succeed_with_a_joiner()
    played.go_on()
    assert sum("is back" in reason for reason in played.decisions()) == 1


def test_a_recovery_does_not_wait_for_etcd_and_is_on_record_once_it_is_back(played):
    played, servers = played
    played.start()
    for member in (0, 1):
        servers.kill(member)
    played.lose_a_worker()
    servers.start(0)
    deadline = time.monotonic() + LIMIT_S
    while not any(("n0.w0" in reason and "left" in reason) or "releas" in reason for reason in played.decisions()):
        assert time.monotonic() < deadline and played.process.poll() is None, played.decisions()[-5:]
        played.say(m.Observed("test", {"node": "n0"}))
        time.sleep(0.1)
    played.succeed_with_a_joiner()
    assert played.hear(m.Repair).sources[1] == Source(0, 0)


def test_an_agents_uplink_finds_the_next_control_plane(played, monkeypatch):
    """The agent's own conversation, over the death of a server and of the control plane."""
    played, servers = played
    played.start()
    monkeypatch.setenv("FT_TOKEN", TOKEN)
    uplink = Uplink(played.folder, "", lambda: None, Timeouts(**BEHIND_ETCD))
    came = []

    def until(true):
        eventually(lambda: came.extend(uplink.take()) or true(), lambda: (came, played.decisions()[-12:]))

    uplink.start(lambda secret: m.AgentJoined("n1", 1, "127.0.0.1", 0, 1), 0)
    try:
        until(lambda: Linked(0) in came)
        uplink.post(m.WorkerStarted("n1.w0", "n1", 11, None))
        servers.kill(servers.leader())
        until(lambda: any(isinstance(what, m.Open) for what in came))
        played.kill()
        uplink.post(m.WorkerReady("n1.w0", "n1", "a:3"))
        played.begin()
        until(lambda: sum(isinstance(what, Linked) for what in came) >= 2)
        until(lambda: any("n1.w0" in reason for reason in played.decisions()))
    finally:
        uplink.close()
    assert not any(isinstance(what, ReportRefused) for what in came)
    assert len([what for what in came if isinstance(what, m.Open)]) == 1
