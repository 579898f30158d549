"""The fault-tolerant all-reduce when something fails: rings of members in one process, and strangers."""

import contextlib
import fcntl
import os
import random
import secrets
import socket
import struct
import termios
import threading
import time

import psutil
import pytest
import torch
from rings import CALM, gather
from test_hsdp_ring import members as members

from ft.net.handshake import GREETING_BYTES, PROOF_BYTES, Party, accept, dial
from ft.systems.hsdp.ring import Ring, RingOptions, connect, numbers
from ft.systems.hsdp.ring.blame import RIGHT
from ft.systems.hsdp.ring.links import BREAK, LEAVE, PING, PONG, ControlMessage, Links, Poller, pack, unpack
from ft.systems.hsdp.ring.numbers import items

HELLO_BYTES = GREETING_BYTES + connect.HELLO.size + PROOF_BYTES
STRANGERS_WORDS = Party("", connect.PURPOSE, False).greeting() + bytes(connect.ANSWER.size + PROOF_BYTES)
QUICK = RingOptions(chunk_bytes=4096, chunks=2, limit_s=3)
PATIENT = RingOptions(chunk_bytes=4096, chunks=2, limit_s=6)
"""Neighbours have seconds to answer in, on a busy machine too."""


def reduce(rings: list[Ring], size: int = 5000) -> list:
    """The outcomes; the sum is checked where they are good."""
    tensors = [torch.full((size,), float(me + 1)) for me in range(len(rings))]
    outcomes = [each.wait() for each in [r.all_reduce(t) for r, t in zip(rings, tensors, strict=True)]]
    for outcome, tensor in zip(outcomes, tensors, strict=True):
        if outcome.ok:
            assert torch.equal(tensor, torch.full((size,), len(rings) * (len(rings) + 1) / 2))
    return outcomes


def all_work(rings: list[Ring], number: int) -> bool:
    """Whether these members make a ring and use it; on a busy machine that may take longer than their limit."""
    for ring in rings:
        ring.expect(CALM.limit_s)
    gather(rings, number)
    outcomes = reduce(rings)
    for ring in rings:
        ring.expect(ring._options.limit_s)
    return all(outcome.ok for outcome in outcomes)


def test_messages_between_neighbours_survive_being_cut_anywhere():
    said = [
        ControlMessage(PING),
        ControlMessage(PONG, 9, True),
        ControlMessage(BREAK, suspect=2, reason="ä" * 300),
        ControlMessage(BREAK),
    ]
    received, heard = bytearray(), []
    for byte in b"".join(pack(each) for each in said):
        received.append(byte)
        heard += unpack(received)
    assert [each.kind for each in heard] == [PING, PONG, BREAK, BREAK]
    assert (heard[1].operation, heard[1].busy, heard[2].suspect, heard[3].suspect) == (9, True, 2, None)
    with pytest.raises(ConnectionError):
        unpack(bytearray(secrets.token_bytes(200)))


@pytest.mark.parametrize("late", range(4))
def test_a_member_that_does_not_come_is_blamed_by_all_and_the_next_quorum_works(members, late):
    rings = members(4, QUICK)
    assert all_work(rings, 1)
    others = [ring for me, ring in enumerate(rings) if me != late]
    for pending in [ring.all_reduce(torch.zeros(9000)) for ring in others]:
        outcome = pending.wait()
        assert not outcome.ok and outcome.suspect == late, outcome
    assert all_work(others, 2)
    assert all_work(rings, 3)


def test_a_member_that_hangs_in_the_middle_of_its_own_reduction_is_blamed(members):
    rings, gate = members(3, QUICK), threading.Event()
    assert all_work(rings, 1)
    hung = rings[1].all_reduce(torch.zeros(9000), after=lambda: gate.wait(60))
    for pending in [rings[0].all_reduce(torch.zeros(9000)), rings[2].all_reduce(torch.zeros(9000))]:
        outcome = pending.wait()
        assert not outcome.ok and outcome.suspect == 1, outcome
    assert all_work([rings[0], rings[2]], 2)
    gate.set()
    assert not hung.wait().ok
    assert all_work(rings, 3)


@pytest.mark.parametrize("done", [0, 1])
def test_who_leaves_before_the_operation_under_way_ends_it(done):
    """Whose left neighbour still waits to be connected would learn of it by nothing else."""
    poller = Poller()
    links, pairs = Links(poller), [socket.socketpair() for _ in range(2)]
    links.join(RIGHT, 1, [pairs[0][0], pairs[1][0]])
    links.operation, links.busy = 1, True
    pairs[0][1].send(pack(ControlMessage(LEAVE, done, suspect=2, reason="2 cannot be reached")))
    pairs[0][0].setblocking(False)
    poller.wait(5)
    assert links.right.gone.suspect == 2
    assert links.broken == (None if done else links.right.gone)
    links.close(links.right.gone)
    poller.close()
    for _, end in pairs:
        end.close()


def test_who_waits_an_operation_behind_for_a_hung_member_is_not_blamed(members, monkeypatch):
    """Member 3 hangs before its last data: 0 still waits for that when 1 and 2, who have theirs, are one further."""
    rings, gate, real = members(4, PATIENT), threading.Event(), numbers.of

    def of(tensor, *others):
        made = real(tensor, *others)
        if tensor is last:
            outgoing = made.outgoing
            final = items(len(tensor), 4, 3, PATIENT.chunk_bytes // 4, PATIENT.chunks)[-1]
            made.outgoing = lambda index, item: (item is final and gate.wait(60), outgoing(index, item))[1]
        return made

    last = torch.zeros(9000)
    assert all_work(rings, 1)
    monkeypatch.setattr(numbers, "of", of)
    rings[1].expect(PATIENT.limit_s * 0.95)  # it is the first that may give up
    hung = rings[3].all_reduce(last)
    pending = [[ring.all_reduce(torch.zeros(9000)) for _ in range(2)] for ring in rings[:3]]
    outcomes = [[each.wait() for each in two] for two in pending]
    gate.set()
    assert [two[0].ok for two in outcomes] == [False, True, True]
    assert [two[1].suspect for two in outcomes] == [3, 3, 3], outcomes
    hung.wait()


def test_members_that_are_closed_are_blamed_at_once_whatever_the_limit(members):
    rings = members(4)
    assert all_work(rings, 1)
    pending = [ring.all_reduce(torch.zeros(9000)) for ring in (rings[0], rings[2], rings[3])]
    rings[1].close()
    assert [each.wait().suspect for each in pending] == [1, 1, 1]
    assert [ring.all_reduce(torch.zeros(3)).wait().skipped for ring in (rings[0], rings[2], rings[3])] == [True] * 3
    assert all_work([rings[3], rings[0], rings[2]], 2)


def test_everything_queued_is_skipped_after_a_failure(members):
    rings = members(2, QUICK)
    assert all_work(rings, 1)
    first, second, third = [rings[0].all_reduce(torch.zeros(5)) for _ in range(3)]
    assert not first.wait().ok and not first.wait().skipped
    assert second.wait().skipped and third.wait().skipped
    assert second.wait().suspect == 1


def test_a_cancel_wakes_who_waits_at_once_and_ends_the_quorum(members):
    rings = members(3)
    assert all_work(rings, 1)
    waiting = [rings[0].all_reduce(torch.zeros(9000)), rings[0].all_reduce(torch.zeros(9000))]
    rings[0].cancel("the control plane knows better")
    assert [each.wait().reason for each in waiting] == ["the control plane knows better"] * 2
    assert "knows better" in rings[1].all_reduce(torch.zeros(5)).wait().reason
    assert rings[0].all_reduce(torch.zeros(5)).wait().skipped
    assert all_work(rings, 2)


def test_a_cancel_before_anybody_waits_ends_the_quorum_too(members):
    rings = members(2)
    assert all_work(rings, 1)
    rings[0].cancel("enough")
    assert [outcome.reason for outcome in reduce(rings)] == ["enough"] * 2
    assert all_work(rings, 2)


def test_a_cancel_ends_the_wait_for_members_of_a_quorum(members):
    rings = members(3)
    rings[0].reconfigure(1, [ring.address for ring in rings], 0)
    pending = rings[0].all_reduce(torch.zeros(5))
    rings[0].cancel("another quorum")
    assert pending.wait().reason == "another quorum"
    assert all_work(rings, 2)


def test_a_quorum_that_a_member_does_not_come_to_fails_and_names_one(members):
    rings = members(2, QUICK)
    rings[0].reconfigure(1, [ring.address for ring in rings], 0)
    outcome = rings[0].all_reduce(torch.zeros(5)).wait()
    assert outcome.suspect == 1 and "has not come to quorum 1" in outcome.reason
    rings[1].reconfigure(1, [ring.address for ring in rings], 1)
    outcome = rings[1].all_reduce(torch.zeros(5)).wait()
    assert not outcome.ok and "has given up this quorum" in outcome.reason
    assert all_work(rings, 2)


def test_a_quorum_with_a_dead_member_fails_at_once_for_all(members):
    rings = members(4)
    rings[2].close()
    gather(rings[:2] + rings[2:], 1)
    outcomes = {member: rings[member].all_reduce(torch.zeros(5)).wait() for member in (0, 1, 3)}
    assert not any(outcome.ok for outcome in outcomes.values()), outcomes
    assert {outcome.suspect for outcome in outcomes.values()} == {2}, outcomes
    # Member 0 has both neighbours, and may have begun the all-reduce before it learns of the dead member.
    assert outcomes[1].skipped and outcomes[3].skipped, outcomes
    assert all_work([rings[0], rings[1], rings[3]], 2)


def test_a_member_at_an_earlier_quorum_is_refused_and_one_at_a_later_waits(members):
    rings = members(2, CALM)
    addresses = [ring.address for ring in rings]
    rings[0].reconfigure(5, addresses, 0)
    rings[1].reconfigure(3, addresses, 1)
    assert "later quorum" in rings[1].all_reduce(torch.zeros(5)).wait().reason
    rings[1].reconfigure(5, addresses, 1)
    assert all(outcome.ok for outcome in reduce(rings))


def test_members_that_do_not_agree_on_who_is_in_the_quorum_are_told_so(members):
    rings = members(3, QUICK)
    addresses = [ring.address for ring in rings]
    rings[0].reconfigure(1, addresses[:2], 0)
    rings[1].reconfigure(1, addresses, 1)
    assert "other members" in rings[0].all_reduce(torch.zeros(5)).wait().reason
    assert not rings[1].all_reduce(torch.zeros(5)).wait().ok
    assert all_work(rings, 2)


def test_a_ring_of_another_run_is_turned_away_and_disturbs_nobody(members):
    rings, (foreign,) = members(2), members(1, token="another run's")
    assert all_work(rings, 1)
    foreign.reconfigure(2, [rings[0].address, foreign.address], 1)
    outcome = foreign.all_reduce(torch.zeros(5)).wait()
    assert not outcome.ok and "no member of this run" in outcome.reason
    assert all(outcome.ok for outcome in reduce(rings))


def test_strangers_and_garbage_on_the_port_never_disturb_an_all_reduce(members, seed):
    chance, stop = random.Random(seed), threading.Event()
    rings = members(3)
    assert all_work(rings, 1)
    hosts = [("127.0.0.1", int(ring.address.rsplit(":", 1)[1])) for ring in rings]

    label = Party("", connect.PURPOSE, True).label

    def disturb():
        kept = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                connection = socket.create_connection(chance.choice(hosts), timeout=5)
                kept.append(connection)
                kind = chance.randrange(4)
                if kind == 0:
                    connection.sendall(chance.randbytes(chance.randrange(1, 5000)))
                elif kind == 1:
                    connection.sendall(label + chance.randbytes(HELLO_BYTES - len(label)))
                elif kind == 2:
                    party = Party("wrong token", connect.PURPOSE, True)
                    theirs = party.read_greeting(connection.recv(GREETING_BYTES))
                    connection.sendall(party.greeting() + party.seal(theirs, connect.HELLO.pack(1, bytes(16), 2, 1)))
            if len(kept) > 100:
                kept.pop(chance.randrange(len(kept))).close()
        for connection in kept:
            connection.close()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for turn in range(60):
            assert all(outcome.ok for outcome in reduce(rings, 20_000))
            if turn % 20 == 19:
                assert all_work(rings, turn)
    finally:
        stop.set()
        thread.join(20)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (b"220 mail.example.org ESMTP ready\r\n", "does not speak the ring's protocol"),
        (b"220 mail\r\n", "does not speak the ring's protocol"),
        (b"", "hung up"),
        (STRANGERS_WORDS, "no member of this run"),
        (None, "has not come to quorum 1"),
    ],
    ids=["another protocol", "a short line", "nothing", "a stranger", "silence"],
)
def test_somebody_else_at_a_members_address_is_found_out_and_gets_no_data(members, says, reason):
    (ring,), heard = members(1, QUICK), []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.05)

        def serve():
            kept = []
            while not over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = stranger.accept()
                    kept.append(connection)
                    connection.settimeout(0.5)
                    if says:
                        connection.sendall(says)
                        heard.append(connection.recv(100_000))
                    elif says is not None:
                        connection.close()
            for connection in kept:
                connection.close()

        over, thread = threading.Event(), threading.Thread(target=serve)
        thread.start()
        try:
            ring.reconfigure(1, [ring.address, f"127.0.0.1:{stranger.getsockname()[1]}"], 0)
            outcome = ring.all_reduce(torch.ones(5000)).wait()
        finally:
            over.set()
            thread.join(20)
    assert not outcome.ok and outcome.suspect == 1 and reason in outcome.reason, outcome
    assert all(len(said) <= HELLO_BYTES for said in heard)


class Half:
    """A member that makes its connections and is never heard of again, as one whose host has lost its power."""

    def __init__(self, token: str):
        self._token = token
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open = [self._listener]

    def join(self, number: int, addresses: list[str], me: int, options: RingOptions) -> None:
        agreed = connect.agreement(addresses, *options.shared())
        host, port = addresses[(me + 1) % len(addresses)].rsplit(":", 1)
        for stream in range(options.streams + 1):
            call = socket.create_connection((host, int(port)), timeout=10)
            said, dialer = connect.HELLO.pack(number, agreed, me, stream), Party(self._token, connect.PURPOSE, True)
            dial(call, dialer, 10, said, connect.ANSWER.size)
            self._open.append(call)
        for _ in range(options.streams + 1):
            connection, _ = self._listener.accept()
            acceptor = Party(self._token, connect.PURPOSE, False)
            theirs, _ = accept(connection, acceptor, 10, connect.HELLO.size, connect.ANSWER.size)
            connection.sendall(acceptor.seal(theirs, connect.ANSWER.pack(connect.TAKEN, number, connect.NOBODY)))
            self._open.append(connection)

    def close(self) -> None:
        for each in self._open:
            each.close()


@pytest.mark.parametrize("elements", [10, 5_000_000])
def test_a_connection_that_nobody_is_at_the_end_of_any_more_ends_at_the_limit(members, elements):
    rings, half = members(2, QUICK), Half("secret")
    addresses = [rings[0].address, half.address, rings[1].address]
    try:
        for ring in rings:
            ring.expect(CALM.limit_s)
        rings[0].reconfigure(1, addresses, 0)
        rings[1].reconfigure(1, addresses, 2)
        half.join(1, addresses, 1, QUICK)
        for ring in rings:
            ring.expect(QUICK.limit_s)
        for pending in [ring.all_reduce(torch.zeros(elements)) for ring in rings]:
            outcome = pending.wait()
            assert not outcome.ok and not outcome.skipped and outcome.suspect == 1, outcome
        assert all_work(rings, 2)
    finally:
        half.close()


def test_the_bytes_in_flight_to_a_neighbour_that_does_not_read_are_bounded(members):
    options, half = RingOptions(chunk_bytes=65536, chunks=2, limit_s=4), Half("secret")
    (ring,) = members(1, options)
    try:
        ring.expect(CALM.limit_s)
        ring.reconfigure(1, [ring.address, half.address], 0)
        half.join(1, [ring.address, half.address], 1, options)
        ring.expect(options.limit_s)
        pending, seen = ring.all_reduce(torch.zeros(50_000_000)), 0
        while not pending.done():
            seen = max([seen, *map(not_acknowledged, connected_to(half.address))])
            time.sleep(0.02)
        assert 0 < seen <= options.chunk_bytes * options.chunks
    finally:
        half.close()


def connected_to(address: str) -> list[socket.socket]:
    """Our own copies of the connections to an address; one that the ring closes meanwhile is left out."""
    copies = []
    port = int(address.rsplit(":", 1)[1])
    connections = [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
    for descriptor in (one.fd for one in connections):
        with contextlib.suppress(OSError):
            copies.append(socket.socket(fileno=os.dup(descriptor)))
    return copies


def not_acknowledged(connection: socket.socket) -> int:
    with connection:
        return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_who_is_done_may_go_on_to_the_next_quorum_while_others_still_read_what_it_sent(members, count):
    rings = members(count)
    addresses = [ring.address for ring in rings]
    for number in range(1, 40):
        outcomes: list = []
        for me, ring in enumerate(rings):
            ring.reconfigure(number, addresses, me)
            outcomes += [ring.all_reduce(torch.zeros(30_000)) for _ in range(2)]
        assert all(outcome.wait().ok for outcome in outcomes)
