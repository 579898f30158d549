"""The run's store: members of the run come in, strangers do not, and change nothing."""

import contextlib
import gc
import resource
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from waiting import at_once

from ft.base.errors import FtError, UserError
from ft.net import listener
from ft.net.framed import Mark
from ft.net.store import StoreConnection, StoreServer, lone_tcp_store

TOKEN = "the token of the test"
LIMIT_S = 20.0


@pytest.fixture(params=["memory", "TCPStore"])
def server(request):
    serving = StoreServer("127.0.0.1", 0, TOKEN, lone_tcp_store() if request.param == "TCPStore" else None)
    member(serving).set("known", "1")
    yield serving
    serving.close()


def member(server) -> StoreConnection:
    return StoreConnection(server.address, TOKEN, LIMIT_S)


def door(server) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def is_served(server) -> bool:
    """A member still gets in, and finds what was there."""
    with contextlib.closing(member(server)) as connection:
        return connection.get("known") == b"1"


def test_members_share_what_is_stored(server):
    first, second = member(server), member(server)
    first.set("a", "first")
    assert second.get("a") == b"first"
    second.queue_push("q", "x")
    assert first.queue_pop("q") == b"x"
    assert first.compare_set("a", "first", "next") == second.get("a") == b"next"
    first.append("a", b"\0end")
    first.multi_set(["b", "c"], [b"", b"\xff"])
    assert second.multi_get(["a", "b", "c"]) == [b"next\0end", b"", b"\xff"]
    assert second.check(["a", "b"]) and not second.check(["a", "absent"])
    assert set(second.list_keys()) == {"known", "a", "b", "c"} and first.num_keys() >= 4
    assert second.clone().get("known") == b"1"
    assert second.delete_key("b") and not second.delete_key("b") and not first.check(["b"])


def test_torch_uses_it_through_a_prefix_of_its_own(server):
    """As gloo does from C++."""
    prefixed = dist.PrefixStore("of/a/group", member(server))
    prefixed.set("a", b"\0\xff")
    assert prefixed.get("a") == b"\0\xff" == member(server).get("of/a/group/a")
    assert prefixed.add("n", 2) == 2 and prefixed.add("n", 3) == 5 and prefixed.has_extended_api()
    assert prefixed.multi_get(["a", "n"]) == [b"\0\xff", b"5"] and prefixed.check(["a"]) and prefixed.delete_key("a")
    gc.collect()
    with pytest.raises(dist.DistStoreError, match="of/a/group/a"):
        prefixed.wait(["n", "a"], timedelta(seconds=0.05))


def test_many_members_at_once(server):
    at_once(lambda number: member(server).add("sum", number), range(24))
    assert int(member(server).get("sum")) == sum(range(24))


def test_whoever_waits_is_answered_as_soon_as_all_keys_are_there(server, aside):
    first, second, third = member(server), member(server), member(server)
    values, entry = aside(first.multi_get, ["x", "y"]), aside(second.queue_pop, "q")
    third.set("y", "2")
    third.set("x", "1")
    assert values.result(LIMIT_S) == [b"1", b"2"] and not entry.done()
    third.queue_push("q", "entry")
    assert entry.result(LIMIT_S) == b"entry"


def test_an_entry_of_a_queue_is_not_given_to_who_has_left(server, aside):
    leaving, staying = member(server), member(server)
    waiting = aside(leaving.queue_pop, "q")
    while not server._of_peer:
        time.sleep(0.001)
    leaving.break_off()
    with pytest.raises(ConnectionError):
        waiting.result(LIMIT_S)
    while server._of_peer:
        time.sleep(0.001)
    staying.queue_push("q", "entry")
    assert staying.queue_pop("q") == b"entry"


def test_a_wait_ends_with_its_time_and_the_connection_stays(server):
    connection = member(server)
    connection.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match="never set"):
        connection.get("never set")
    with pytest.raises(dist.DistStoreError):
        connection.queue_pop("empty", block=False)
    assert connection.get("known") == b"1" and not server._waiting


def test_what_makes_no_sense_is_refused_and_the_connection_stays(server):
    connection = member(server)
    connection.set("text", "abc")
    with pytest.raises(FtError, match="refuses a request"):
        connection.add("text", 1)
    for kind, words in ((b"what", {"keys": ["a"]}), (b"get ", {"keys": 5}), (b"get ", {}), (b"pop ", {"keys": []})):
        connection._channel.send(kind, Mark(), words)
        assert connection._channel.receive().kind == b"fail"
    assert connection.get("known") == b"1"


def test_a_blocked_call_is_broken_off_and_later_ones_fail(server):
    connection = member(server)
    threading.Timer(0.1, connection.break_off).start()
    with pytest.raises(ConnectionError):
        connection.get("never set")
    with pytest.raises(ConnectionError):
        connection.get("known")
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


def test_strangers_who_say_nothing_hold_up_nobody(server):
    number = listener.MOST_STRANGERS + 50
    silent = [socket.create_connection(door(server), timeout=LIMIT_S) for _ in range(number)]
    assert is_served(server)
    for stranger in silent:
        stranger.close()


def test_a_server_without_free_descriptors_goes_on_and_admits_members(ranks):
    """Its process may open 64 files. Strangers keep 200 connections open, and more than the store may accept."""
    handle, address = served(ranks, 64)
    before = StoreConnection(address, TOKEN, LIMIT_S)
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as strangers:
        for _ in range(200):
            strangers.enter_context(socket.create_connection((host, int(port)), timeout=LIMIT_S))
        before.set("a", "1")
        assert StoreConnection(address, TOKEN, LIMIT_S).get("a") == b"1"
    assert before.get("a") == b"1"
    handle.close()


def test_nobody_can_connect_to_the_tcp_store_behind_it(monkeypatch):
    listeners, create = [], socket.create_server

    def created(*args, **more):
        listeners.append(create(*args, **more))
        addresses.append(listeners[-1].getsockname())
        return listeners[-1]

    addresses = []
    monkeypatch.setattr(socket, "create_server", created)
    store = lone_tcp_store()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=LIMIT_S)
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_a_tcp_store_that_somebody_has_reached_is_thrown_away(monkeypatch):
    strangers, make = [], dist.TCPStore

    def made(host, port, **more):
        store = make(host, port, **more)
        if not strangers:
            strangers.append(make(host, port, is_master=False, wait_for_workers=False))
        return store

    monkeypatch.setattr(c10d, "TCPStore", made)
    store = lone_tcp_store()
    store.set("a", "1")
    with pytest.raises(RuntimeError):
        strangers[0].check(["a"])


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
            StoreConnection(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, LIMIT_S)


def test_the_store_ends_with_its_process_and_connections_break(ranks):
    handle, address = served(ranks, 0)
    connection = StoreConnection(address, TOKEN, LIMIT_S)
    handle.kill(0)
    with pytest.raises(ConnectionError):
        connection.get("never set")
    handle.close()


def served(ranks, descriptors: int) -> tuple:
    """Start a process with a store, which may open so many files, 0: as many as this one; and its address."""
    handle = ranks.start(serve, 1, descriptors, init=False)
    handle.wait_for_output(0, "address")
    return handle, handle.output(0).split()[-1]


def serve(descriptors: int):
    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    server = StoreServer("127.0.0.1", 0, TOKEN)
    print("address", server.address, flush=True)
    time.sleep(600)


def test_a_store_that_lets_in_and_then_says_nothing_is_an_error(server, monkeypatch):
    connection = member(server)
    monkeypatch.setattr("ft.net.store._GRACE_S", 0.2)
    monkeypatch.setattr(server._acceptor, "answer", lambda *_: None)
    with pytest.raises(ConnectionError, match="does not write"):
        connection.set("a", "1")
