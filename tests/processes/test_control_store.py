"""The guarded store: members of the run come in, strangers do not, and change nothing."""

import contextlib
import gc
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from ft.base.errors import UserError
from ft.net.handshake import GREETING_BYTES, Party, Refused, dial
from ft.net.store import StoreConnection, StoreServer, client
from ft.net.store.server import PORT, PURPOSE

TOKEN = "of the test"
LIMIT_S = 20.0


@pytest.fixture
def server():
    serving = StoreServer("127.0.0.1", 0, TOKEN)
    serving.store.set("known", "1")
    yield serving
    serving.close()


def door(server) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def is_served(server) -> bool:
    """A member still gets in, and finds what was there."""
    connection = StoreConnection(server.address, TOKEN, LIMIT_S)
    found = connection.store.get("known")
    connection.close()
    return found == b"1"


def test_members_share_what_is_stored(server):
    first, second = (StoreConnection(server.address, TOKEN, LIMIT_S) for _ in range(2))
    first.store.set("a", "first")
    assert second.store.get("a") == b"first" == server.store.get("a")
    second.store.queue_push("q", "x")
    assert first.store.queue_pop("q") == b"x"


def test_many_members_at_once(server):
    found = []

    def enter(number):
        connection = StoreConnection(server.address, TOKEN, LIMIT_S)
        connection.store.add("sum", number)
        found.append(connection)

    members = [threading.Thread(target=enter, args=(number,)) for number in range(24)]
    for member in members:
        member.start()
    for member in members:
        member.join(LIMIT_S)
    assert len(found) == 24 and int(server.store.get("sum")) == sum(range(24))


def test_a_member_outlives_the_object_that_let_it_in(server):
    store = StoreConnection(server.address, TOKEN, LIMIT_S).store
    gc.collect()
    assert store.get("known") == b"1"


def test_a_clone_is_served_as_well(server):
    clone = StoreConnection(server.address, TOKEN, LIMIT_S).store.clone()
    assert clone.get("known") == b"1"


def test_a_blocked_call_is_broken_off_and_later_ones_fail(server):
    connection = StoreConnection(server.address, TOKEN, LIMIT_S)
    threading.Timer(0.1, connection.break_off).start()
    with pytest.raises(RuntimeError):
        connection.store.get("never set")
    with pytest.raises(RuntimeError):
        connection.store.get("known")
    assert connection.is_broken and is_served(server)


def test_the_wrong_token_is_refused_by_name(server):
    with pytest.raises(UserError, match="belongs to another run"):
        StoreConnection(server.address, "another one", LIMIT_S)
    assert is_served(server)


NONSENSE = [b"", b"\n", b"x" * 5000, b"a b\n", b"a 99999999999\n", b"\xff\xfe -1\n", b"GET / HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize("said", NONSENSE)
def test_who_talks_nonsense_is_sent_away(said, server):
    # The end may come while something is still on its way that nobody has read, and before all has been said.
    with socket.create_connection(door(server), timeout=LIMIT_S) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(said)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):
            pass
    assert is_served(server)


def test_an_answer_overheard_lets_nobody_else_in(server):
    class Overheard(Party):
        def seal(self, theirs, message=b""):
            return said

    party, port = Party(TOKEN, PURPOSE, is_dialer=True), PORT.pack(1234)
    with socket.create_connection(door(server), timeout=LIMIT_S) as member:
        said = party.seal(party.read_greeting(member.recv(GREETING_BYTES)), port)
        with socket.create_connection(door(server), timeout=LIMIT_S) as stranger, pytest.raises(Refused):
            dial(stranger, Overheard(TOKEN, PURPOSE, True, party.challenge), LIMIT_S, port, PORT.size)
        member.sendall(party.greeting() + said)
        assert len(member.recv(1000)) > PORT.size


def test_a_member_gives_its_port_with_its_proof(server):
    """Whoever changes the port on the way lets nobody in."""
    party = Party(TOKEN, PURPOSE, is_dialer=True)
    with socket.create_connection(door(server), timeout=LIMIT_S) as member:
        said = party.seal(party.read_greeting(member.recv(GREETING_BYTES)), PORT.pack(1234))
        member.sendall(party.greeting() + PORT.pack(1235) + said[PORT.size :])
        assert member.recv(1000).endswith(Party.REFUSAL)


def test_a_store_of_whoever_does_not_know_the_token_is_not_entered():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def pose():
            visitor, posing = other.accept()[0], Party("a guess", PURPOSE, is_dialer=False)
            visitor.sendall(posing.greeting())
            theirs = posing.read_greeting(visitor.recv(1000)[:GREETING_BYTES])
            visitor.sendall(posing.seal(theirs, PORT.pack(other.getsockname()[1])))

        threading.Thread(target=pose, daemon=True).start()
        with pytest.raises(ConnectionError, match="is no store of a run"):
            StoreConnection(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, LIMIT_S)


def test_strangers_who_say_nothing_hold_up_nobody(server):
    silent = [socket.create_connection(door(server), timeout=LIMIT_S) for _ in range(50)]
    assert is_served(server)
    for stranger in silent:
        stranger.close()


def test_torchs_own_client_gets_in_neither_at_the_door_nor_at_the_store(server):
    inside = int(StoreConnection(server.address, TOKEN, LIMIT_S)._own.getpeername()[1])
    for port in (door(server)[1], inside):
        with pytest.raises(RuntimeError):
            dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=0.5))
    assert is_served(server) and server.store.num_keys() == server.store.num_keys()


def test_the_stores_own_port_takes_no_packet_of_a_stranger(server):
    inside = StoreConnection(server.address, TOKEN, LIMIT_S)._own.getpeername()
    with pytest.raises(TimeoutError):
        socket.create_connection(inside, timeout=0.3)
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.2", 0))
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.connect(inside)


def test_nobody_answers():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionError):
        StoreConnection(f"127.0.0.1:{port}", TOKEN, 1.0)


def test_somebody_else_listens():
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"220 mail\r\n"), daemon=True).start()
        with pytest.raises(ConnectionError, match="is no store of a run"):
            StoreConnection(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, 1.0)


def test_the_store_ends_with_its_process_and_connections_break(ranks):
    handle = ranks.start(serve, 1, init=False)
    handle.wait_for_output(0, "address")
    address = handle.output(0).split()[-1]
    connection = StoreConnection(address, TOKEN, LIMIT_S)
    handle.kill(0)
    with pytest.raises(RuntimeError):
        connection.store.get("never set")
    handle.close()


def serve():
    server = StoreServer("127.0.0.1", 0, TOKEN)
    print("address", server.address, flush=True)
    time.sleep(LIMIT_S)


def test_a_client_of_torch_that_fails_before_it_connects_is_an_error_and_no_hang(server, monkeypatch):
    """As when the name server, which torch asks in between, does not answer for longer than the connection may take."""

    def fail(port):
        raise RuntimeError("The client socket has timed out")

    monkeypatch.setattr(client, "_client", fail)
    with pytest.raises(ConnectionError, match="timed out"):
        StoreConnection(server.address, TOKEN, LIMIT_S)


def test_a_store_that_lets_in_and_then_says_nothing_is_an_error(server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(client, "_enter", lambda *_: socket.create_connection(silent.getsockname()))
        with pytest.raises(ConnectionError, match="does not answer"):
            StoreConnection(server.address, TOKEN, 0.3)


def test_a_store_that_ends_while_a_client_makes_itself_known_is_an_error(server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as dying:

        def enter(*_):
            own = socket.create_connection(dying.getsockname())
            threading.Thread(target=end_once_spoken_to, args=(dying,), daemon=True).start()
            return own

        monkeypatch.setattr(client, "_enter", enter)
        with pytest.raises(ConnectionError, match="does not answer"):
            StoreConnection(server.address, TOKEN, LIMIT_S)


def end_once_spoken_to(listener):
    own, _ = listener.accept()
    own.recv(1)
    own.close()
