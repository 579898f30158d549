"""The quorum server and its clients as real processes: killed, stopped, lied to."""

import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
from pythons import environment
from waiting import eventually

from ft.base import events
from ft.base.errors import FtError, RecoverableError, UserError
from ft.job.quorum import GIVEN_UP, Limits, NoQuorum, QuorumClient, ReplicaNotice, Report
from ft.job.quorum.values import FRAME, PURPOSE, pack, parse_where
from ft.net.framed import Stream
from ft.net.handshake import PROOF_BYTES, NotAMember, Party
from ft.net.listener import Acceptor
from ft.platform import election
from ft.platform.election import QUORUM, SUCCEEDED
from ft.systems.hsdp.components import Components

LIMIT_S = 60.0
PATIENT = {"wait_s": LIMIT_S, "member_s": LIMIT_S, "start_s": 2 * LIMIT_S}
"""A busy machine does not make a member late; a test that is about it gives shorter limits."""
TOKEN = "the token of the test"
LEADER = """
import sys, time
from ft.job.quorum import QuorumClient, Report
replica, life = int(sys.argv[2]), int(sys.argv[3])
client = QuorumClient(sys.argv[1], replica, life, sys.argv[4])
client.hello([{"ring": f"r{replica}"}])
state = (0, 0)
while True:
    quorum = client.ask(Report(replica, life, *state, step_s=0.01)).result(30)
    state = (quorum.step + 1, quorum.number)
"""


class Service:
    """A run's folder, its server, and leaders in this process."""

    def __init__(self, folder):
        self.folder, self.processes, self.ends = folder, [], []
        (folder / "token").write_text(TOKEN)
        self.log = open(folder / "log", "ab")  # noqa: SIM115 - closed at the end
        self.server = None

    def serve(self, replicas=2, **options):
        limits = {"lost_s": 0.1, "silent_s": 4.5, "beat_s": 0.1, **PATIENT, **options.pop("limits", {})}
        term = self.term()
        words = json.dumps({"replicas": replicas, "limits": limits, **options})
        self.server = self.run("-m", "ft.job.quorum", "--run-dir", str(self.folder), "--options", words)
        self.until(lambda: self.term() > term, "no quorum.json")
        return self.server

    def begin(self, **options):
        """Serve two replicas; return the server, their leaders, and their first quorum."""
        server = self.serve(2, **options)
        clients = [self.client(replica) for replica in range(2)]
        return server, clients, both(clients, [(0, 0)] * 2)

    def lose_the_server(self):
        self.server.kill()
        self.server.wait()

    def term(self):
        found = election.read(self.folder, QUORUM)
        return found.term if found is not None else -1

    def run(self, *words):
        process = subprocess.Popen([sys.executable, *words], env=environment(), stdout=self.log, stderr=self.log)
        self.processes.append(process)
        return process

    def leader(self, replica, life=0):
        """One in a process of its own, that asks for one step after the other."""
        return self.run("-c", LEADER, str(self.folder), str(replica), str(life), TOKEN)

    def client(self, replica, life=0, token=TOKEN, **limits):
        client = QuorumClient(self.folder, replica, life, token, Limits(beat_s=0.1, **limits))
        client.hello([{"ring": f"ring {replica}.{life}", "fetch": "f"}] * 2)
        self.ends.append(client)
        return client

    def until(self, is_so, words):
        eventually(is_so, lambda: f"{words}\n{self.said()}")

    def named(self):
        """Names of the events so far."""
        return [event.name for event in events.read(self.folder / "events.jsonl")]

    def said(self):
        return (self.folder / "log").read_text()

    def address(self):
        return parse_where(election.read(self.folder, QUORUM).where)

    def close(self):
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.kill()
            process.wait()
        self.log.close()


@pytest.fixture
def service(tmp_path):
    service = Service(tmp_path)
    yield service
    service.close()


def ask(client, state=(0, 0), **values):
    return client.ask(Report(client.replica, client.life, *state, step_s=0.01, **values))


def both(clients, states):
    """All ask and are answered alike; returns the quorum."""
    quorums = [future.result(LIMIT_S) for future in [ask(*pair) for pair in zip(clients, states, strict=True)]]
    assert all(quorum == quorums[0] for quorum in quorums)
    return quorums[0]


def after(quorum):
    return (quorum.step + 1, quorum.number)


def test_leaders_are_given_quorums_and_each_other_s_addresses(service):
    _, clients, quorum = service.begin()
    assert (quorum.number, quorum.healthy, quorum.lives) == (1, (0, 1), {0: 0, 1: 0})
    assert clients[0].rows(1, 0) == [{"ring": "ring 1.0", "fetch": "f"}] * 2
    assert clients[1].rows(1, 0)[0]["ring"] == "ring 1.0", "its own, too"
    with pytest.raises(FtError, match="life 1 of replica 1"):
        clients[0].rows(1, 1)
    quorum = both(clients, [after(quorum), (0, 0)])
    assert (quorum.step, quorum.healthy, quorum.behind) == (1, (0,), (1,))
    named = [(event.name, event.detail.get("replica")) for event in events.read(service.folder / "events.jsonl")]
    assert sorted(named[:2]) == [("replica_online", 0), ("replica_online", 1)]
    assert [name for name, _ in named[2:]] == ["quorum_formed"], "the members have not changed since"


def test_a_new_life_is_known_by_its_new_addresses_and_the_old_one_is_refused(service):
    _, clients, quorum = service.begin()
    again = service.client(1, life=1)
    quorum = both([clients[0], again], [after(quorum), (0, -1)])
    assert quorum.behind == (1,) and clients[0].rows(1, 1)[0]["ring"] == "ring 1.1"
    with pytest.raises(NoQuorum, match="life 0 of replica 1 is over"):
        ask(clients[1], after(quorum)).result(LIMIT_S)


def test_a_killed_server_s_successor_goes_on_with_what_was_asked(service):
    _, clients, quorum = service.begin()
    waits = ask(clients[0], after(quorum))
    assert not wait([waits], 0.2).done
    service.lose_the_server()
    other = ask(clients[1], after(quorum))
    service.serve(2, takes_over=True)
    newer = waits.result(LIMIT_S)
    assert newer == other.result(LIMIT_S) and newer.number > quorum.number + 10**8 and newer.healthy == (0, 1)
    assert clients[0].rows(1, 0) == [{"ring": "ring 1.0", "fetch": "f"}] * 2


def test_a_leader_can_ask_whom_the_server_waits_for_and_notices_its_silence(service):
    server, clients, quorum = service.begin()
    assert clients[0].inspect(1.0).asked is None
    waits = ask(clients[0], after(quorum))
    view = clients[0].inspect(LIMIT_S)
    assert view.waits == {1: "is at work in the last quorum"} or view.waits == {
        1: "was in the last quorum and is slower"
    }
    assert (view.following, view.last, view.asked.next_step) == (quorum.number + 1, quorum, quorum.step + 1)
    service.until(lambda: clients[0].inspect(0.05).silent_s < 0.4, "it is silent before it is stopped")
    server.send_signal(signal.SIGSTOP)
    service.until(lambda: clients[0].inspect(0.05).silent_s > 0.4, "its silence is not noticed")
    assert clients[0].inspect(0.05).waits is None
    server.send_signal(signal.SIGCONT)
    ask(clients[1], after(quorum))
    assert waits.result(LIMIT_S).number == quorum.number + 1


def test_the_older_of_two_servers_loses(service):
    first, clients, quorum = service.begin()
    first.send_signal(signal.SIGSTOP)
    service.serve(2, takes_over=True)
    later = both(clients, [after(quorum)] * 2)
    first.send_signal(signal.SIGCONT)
    assert first.wait(LIMIT_S) == SUCCEEDED
    assert later.number > quorum.number and both(clients, [after(later)] * 2).number == later.number + 1
    assert election.read(service.folder, QUORUM).pid == service.server.pid


def test_many_servers_at_once_leave_one(service):
    words = json.dumps({"replicas": 2})
    servers = [
        service.run("-m", "ft.job.quorum", "--run-dir", str(service.folder), "--options", words) for _ in range(4)
    ]
    service.until(lambda: sum(server.poll() is None for server in servers) == 1, "several servers")
    assert both([service.client(replica) for replica in range(2)], [(0, 0)] * 2).members == (0, 1)


def test_the_end_of_the_run_is_known_to_the_next_server(service):
    _, clients, quorum = service.begin()
    assert ask(clients[0], after(quorum), finished=True).result(LIMIT_S).finished
    clients[0].leave("done")
    clients[0].close()
    service.lose_the_server()
    service.serve(2, takes_over=True)
    assert ask(clients[1]).result(LIMIT_S).finished


def test_a_replica_that_finishes_while_there_is_no_server_ends_when_the_next_one_knows(service, aside):
    _, clients, quorum = service.begin(min_replicas=2)
    service.lose_the_server()
    own = SimpleNamespace(client=clients[0])
    ends = aside(Components.finish, own, Report(0, 0, *after(quorum), step_s=0.01))
    assert not wait([ends], 1.0).done
    service.serve(2, min_replicas=2, takes_over=True)
    ends.result(LIMIT_S)
    clients[0].close()
    assert ask(clients[1], (quorum.step, quorum.lineage)).result(LIMIT_S).finished


def test_a_killed_leader_is_left_out(service):
    service.serve(2)
    client, leader = service.client(0), service.leader(1)
    quorum = ask(client).result(LIMIT_S)
    assert quorum.members == (0, 1)
    leader.kill()
    leader.wait()
    quorum = ask(client, after(quorum)).result(LIMIT_S)
    while 1 in quorum.members:  # it was killed with a report under way
        quorum = ask(client, (quorum.step, quorum.lineage), suspects=(1,)).result(LIMIT_S)
    assert "connection to its leader broke" in quorum.reason
    service.leader(1, life=1)
    while 1 not in quorum.members:
        quorum = ask(client, after(quorum)).result(LIMIT_S)
    assert quorum.lives[1] == 1 and quorum.behind == (1,)
    names = service.named()
    assert names.count("replica_offline") == 1 and names.count("replica_online") == 3


def test_one_that_leaves_waits_for_nothing_more_and_nobody_for_it(service):
    _, clients, quorum = service.begin()
    waits = ask(clients[1], after(quorum))
    clients[1].leave("rank 3 was killed")
    with pytest.raises(RecoverableError, match="rank 3 was killed"):
        waits.result(LIMIT_S)
    service.until(lambda: "replica_offline" in service.named(), "the server has not heard of it")
    quorum = ask(clients[0], after(quorum)).result(LIMIT_S)
    assert quorum.members == (0,) and "replica 1 is offline: rank 3 was killed" in quorum.reason
    with pytest.raises(NoQuorum, match="life 0"):
        ask(clients[1], (0, 0)).result(LIMIT_S)


def test_one_that_is_given_up_is_waited_for_no_more(service):
    _, clients, quorum = service.begin()
    waits = ask(clients[0], after(quorum))
    assert not wait([waits], 0.2).done
    service.ends.append(ReplicaNotice(service.folder, 1, 0, TOKEN, GIVEN_UP, "its input cannot work"))
    assert "replica 1 is offline: its input cannot work" in waits.result(LIMIT_S).reason
    with pytest.raises(NoQuorum, match="life 0"):
        ask(clients[1], after(quorum)).result(LIMIT_S)


def test_one_that_has_begun_is_waited_for_and_then_says_hello_on_the_same_connection(service):
    _, clients, quorum = service.begin(limits={"arrive_s": LIMIT_S})
    clients[1].leave("rank 3 was killed")
    comes = QuorumClient(service.folder, 1, 1, TOKEN)
    service.ends.append(comes)
    comes.arriving()
    waits = ask(clients[0], after(quorum))
    while "arriving" not in str((clients[0].inspect(LIMIT_S).waits or {}).get(1)):  # the server has not heard of it
        if wait([waits], 0.1).done:
            quorum = waits.result()
            waits = ask(clients[0], after(quorum))
    comes.hello([{"ring": "x:1", "fetch": "x:2"}])
    quorum = both([comes], [(0, -1)])
    assert quorum == waits.result(LIMIT_S) and quorum.lives[1] == 1 and quorum.behind == (1,)


def test_one_that_is_busy_with_something_else_is_waited_for_by_the_next_server_too(service):
    _, clients, quorum = service.begin(limits={"member_s": 5.0, "blamed_s": 4.0})
    clients[1].aside()
    waits = ask(clients[0], after(quorum))
    service.until(lambda: "busy" in str((clients[0].inspect(LIMIT_S).waits or {}).get(1)), "it is not known to be busy")
    service.lose_the_server()
    service.serve(2, limits={"member_s": 5.0, "blamed_s": 4.0})
    assert not wait([waits], 6.0).done
    assert both([clients[1]], [after(quorum)]) == waits.result(LIMIT_S)
    assert waits.result().members == (0, 1)


def test_a_stopped_leader_is_waited_for_no_longer_than_it_beats_and_comes_back_behind(service):
    service.serve(2, limits={"silent_s": 1.0, "wait_s": 0.1})
    client, leader = service.client(0), service.leader(1)
    quorum = ask(client).result(LIMIT_S)
    leader.send_signal(signal.SIGSTOP)
    for _ in range(3):
        quorum = ask(client, after(quorum)).result(LIMIT_S)
    assert quorum.members == (0,)
    leader.send_signal(signal.SIGCONT)
    while 1 not in quorum.members:
        quorum = ask(client, after(quorum)).result(LIMIT_S)
    assert quorum.behind == (1,)


def test_a_wrong_token_is_refused_and_nobody_else_minds(service):
    service.serve(1)
    client, stranger = service.client(0), service.client(0, token="another run's")
    with pytest.raises(UserError, match="refuses this one's token"):
        ask(stranger).result(LIMIT_S)
    with pytest.raises(UserError, match="token"):
        ask(stranger).result(LIMIT_S)
    assert ask(client).result(LIMIT_S).members == (0,)
    assert "its token is not that of this run" in service.said()


@pytest.mark.parametrize("said", ["nothing of worth", "its own answer", "no challenge before"])
def test_a_server_that_does_not_know_the_token_is_told_nothing(said):
    own, other = socket.socketpair()
    with own, other:
        stream = Stream(own, TOKEN, PURPOSE, is_dialer=True)
        stream.send(FRAME, bodies=[pack({"kind": "report"})])
        answer = b"\1" * PROOF_BYTES
        if said != "no challenge before":
            other.sendall(Party("another", PURPOSE, is_dialer=False).greeting())
            assert stream.receive() == []
            sent = other.recv(1000)
            answer = sent[-PROOF_BYTES:] if said == "its own answer" else answer
        other.sendall(answer)
        with pytest.raises(NotAMember):
            stream.receive()
        assert not stream.is_member
        stream.close()
        assert b"report" not in other.recv(1000)


def test_nonsense_from_a_member_costs_it_the_connection_and_no_more(service):
    service.serve(1)
    client = service.client(0)
    quorum = ask(client).result(LIMIT_S)
    messages = [
        {"kind": "report", "report": {}},
        {"kind": "hello", "replica": "0", "life": 0, "rows": [], "known": {}},
        {"kind": "hello", "replica": 7, "life": 0, "rows": [1], "known": {}},
        {"kind": "hello", "replica": 7, "life": 0, "rows": [], "known": {}, "last": {"number": 1}},
        {"kind": "notice", "replica": 0, "life": 0, "what": "on fire"},
        {"kind": "leave"},
        {"kind": "open sesame"},
    ]
    for message in messages:
        stream = Stream(socket.create_connection(service.address()), TOKEN, PURPOSE, is_dialer=True)
        stream.send(FRAME, bodies=[pack(message)])
        stream.socket.settimeout(LIMIT_S)
        with pytest.raises(ConnectionError):
            while True:
                stream.receive()
        stream.close()
        quorum = ask(client, after(quorum)).result(LIMIT_S)
    assert quorum.number == len(messages) + 1


def test_no_message_of_a_member_s_however_wrong_ends_the_server(service, seed):
    draw = random.Random(seed)
    service.serve(1)
    quorum = {"number": 3, "step": 2, "lineage": 1, "healthy": [7], "behind": [], "lives": {"7": 0}}
    report = {"replica": 7, "life": 0, "next_step": 3, "lineage": 3, "suspects": [1], "step_s": 0.1, "number": 3}
    sound = [
        {"kind": "hello", "replica": 7, "life": 0, "rows": [{"ring": "a"}], "known": {"1": 0}, "last": quorum},
        {"kind": "report", "report": report},
        {"kind": "notice", "replica": 7, "life": 0, "what": "given up", "reason": "x"},
        {"kind": "notice", "replica": 7, "life": 0, "what": "repairs"},
        {"kind": "leave", "reason": "x"},
        {"kind": "beat"},
    ]
    values = [None, True, -1, 1.5, 1 << 80, "", "7", "\ud800", [], {}, [[]], {"": None}, float("nan"), "x" * 70000]
    for _ in range(150):
        stream = Stream(socket.create_connection(service.address()), TOKEN, PURPOSE, is_dialer=True)
        for _ in range(3):
            stream.send(FRAME, bodies=[pack(_spoilt(draw, draw.choice(sound), values))])
        with contextlib.suppress(OSError):
            deadline = time.monotonic() + LIMIT_S
            while not stream.is_member and time.monotonic() < deadline:
                stream.receive()
            stream.flush()
        stream.close()
    assert service.server.poll() is None, service.said()
    assert ask(service.client(0)).result(LIMIT_S).members


def _spoilt(draw, message, values):
    """A copy with one value, at any depth, in place of another, or left out."""
    message = json.loads(json.dumps(message))
    place = message
    while True:
        key = draw.choice(list(place))
        if isinstance(place[key], dict) and place[key] and draw.random() < 0.8:
            place = place[key]
            continue
        if draw.random() < 0.15:
            del place[key]
        else:
            place[key] = draw.choice(values)
        return message


def test_without_a_server_an_answer_fails_in_time(service):
    client = service.client(0, away_s=0.3, contact_s=0.2, back_s=0.25)
    with pytest.raises(RecoverableError, match="no quorum server"):
        ask(client).result(LIMIT_S)
    pending = ask(client)
    client.close()
    with pytest.raises(RecoverableError):
        pending.result(LIMIT_S)


def test_one_that_hangs_up_before_it_is_taken_in_costs_the_server_nothing_and_those_behind_it_come_in():
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    acceptor = Acceptor(listener, TOKEN, PURPOSE, "test")
    hasty = socket.create_connection(address, timeout=LIMIT_S)
    hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the close resets it
    hasty.close()
    with socket.create_connection(address, timeout=LIMIT_S) as other:
        assert acceptor.turn(LIMIT_S) == ([], [])
        assert other.recv(len(PURPOSE)) == PURPOSE.encode()
    acceptor.close()
