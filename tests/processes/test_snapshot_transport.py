"""Peer copies over TCP and over MPI: what breaks a transfer, and what is left then."""

import contextlib
import random
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
from networks import from_text
from proxies import Proxy
from snapshot_crew import MIB, set_to, state
from waiting import eventually

from ft.base.errors import EpochClosed
from ft.job.parts import Source
from ft.net.framed import FramedChannel, Mark
from ft.state.layout import Table
from ft.state.snapshot import Snapshots, SnapshotServer
from ft.state.transfer import ASK, NOT_HELD, PURPOSE, PUSH, RANGE, REFUSED, WORDS, PeerLost


def test_a_byte_flipped_in_transit_is_sent_again(crew):
    def flip(data, before):
        at = 3 * MIB // 2
        if proxy.connections == 1 and before <= at < before + len(data):
            data = bytearray(data)
            data[at - before] ^= 8
        return data

    workers = crew(2)
    with Proxy(workers.addresses[1], asks=flip, network=workers.networks.of(0)) as proxy:
        workers.snaps[0].place({**workers.addresses, 1: proxy.address})
        workers.step(5)
        assert proxy.connections == 2
        assert workers.servers[1].stock.find(0, 5).damage() is None


def test_a_dropped_connection_is_survived_in_place(crew):
    def cut(data, before):
        return None if proxy.connections <= 2 and before > MIB else data

    workers = crew(2, steps=[4])
    with Proxy(workers.addresses[1], asks=cut, network=workers.networks.of(0)) as proxy:
        workers.snaps[0].place({**workers.addresses, 1: proxy.address})
        workers.step(5)
        assert proxy.connections == 3
    workers.snaps[0].place(workers.addresses)
    workers.step(6)
    assert workers.snaps[1].holdings().copies == {0: [5, 6]}


def take_alone(snaps, live, step, epoch=0, why=""):
    """Take a snapshot of which no peer gets a copy, and settle."""
    snaps.take(set_to(live, step), step, epoch)
    with pytest.raises(PeerLost, match=why):
        snaps.wait()
    snaps.settle()


def test_a_peer_that_is_gone_is_reported_and_the_own_copy_stays(crew):
    told = []
    workers = crew(2, steps=[4])
    workers.snaps[0]._on_failure = lambda what, error: told.append((what, type(error)))
    workers.servers[1].close()
    take_alone(workers.snaps[0], workers.live[0], 5, why="step 5 is not safe with logical rank 1")
    assert told == [("snapshot to rank 1", PeerLost)]
    assert workers.snaps[0].lag == 1
    assert workers.snaps[0].holdings().own == [4, 5]


def test_a_transfer_that_fails_at_any_moment_leaves_the_copy_before_it(crew, seed):
    rng, workers = random.Random(seed), crew(2)
    workers.step(0)
    length = 5 * MIB // 2
    for step in range(1, 13):
        cut = rng.randrange(length)

        def spoil(data, before, cut=cut):
            return None if before + len(data) > cut else data

        with Proxy(workers.addresses[1], asks=spoil, network=workers.networks.of(0)) as proxy:
            workers.snaps[0].place({**workers.addresses, 1: proxy.address})
            take_alone(workers.snaps[0], workers.live[0], step, epoch=step)
        held = workers.servers[1].stock.find(0, 0)
        assert held is not None
        assert held.damage() is None
        assert 0 in workers.snaps[1].holdings().copies[0]
        assert step in workers.snaps[0].holdings().own


def test_epochs_that_are_over_are_refused(crew):
    workers = crew(2)
    workers.step(4, epoch=3)
    workers.snaps[1].settle()
    take_alone(workers.snaps[0], workers.live[0], 5, epoch=3, why="epoch 3 is over")
    assert workers.snaps[1].holdings().copies == {0: [4]}
    workers.step(4, epoch=4)
    assert workers.snaps[1].holdings().copies == {0: [4]}


def test_an_interruption_ends_a_wait_and_a_restore_at_once(crew):
    workers = crew(2, steps=[4])
    silent, nowhere = workers.networks.of(1).listen()
    snaps, live = workers.snaps[0], workers.live[0]
    snaps.place({0: workers.addresses[0], 1: nowhere})
    for epoch, blocked in ((0, snaps.wait), (1, lambda: snaps.restore(live, 4, Source(1, 1), epoch=1))):
        if epoch == 0:
            snaps.take(set_to(live, 5), 5, 0)
        timer = threading.Timer(0.2, snaps.interrupt, (epoch, "rank 1 is gone"))
        timer.start()
        with pytest.raises(EpochClosed, match="rank 1 is gone"):
            blocked()
        timer.join()
        snaps.settle()
    with pytest.raises(EpochClosed):
        snaps.restore(live, 4, Source(1, 1), epoch=1)
    assert 4 in snaps.holdings().own
    silent.close()


def absurd_requests() -> list[tuple]:
    table = Table.of({"a": torch.zeros(4)})
    huge = replace(table.entries[0], shape=(1 << 60,))
    monster, mark = Table((huge,), huge.nbytes), Mark(0, 9, 9)
    return [
        (PUSH, mark, {}, monster.encoded, b"m"),
        (PUSH, mark, {}, b"[1]", b"m"),
        (PUSH, mark, {}, table.encoded),
        (PUSH, Mark(-1, 9, 9), {}, table.encoded, b"m"),
        (PUSH, Mark(0, -9, 9), {}, table.encoded, b"m"),
        (ASK, Mark(0, 10**9), {"section": "owned"}),
        (ASK, Mark(0, 4), {"section": "../../etc"}),
        (ASK, Mark(0, 4)),
        (WORDS, Mark(0, 4)),
        (RANGE, Mark(0, 4), {"start": 0, "stop": 64}),
        (b"evil", Mark()),
    ]


def test_absurd_requests_cost_nothing(crew):
    """What strangers ask for: ``test_hsdp_fetch_faults.py``, whose server has the same door."""
    workers = crew(2, steps=(3, 4))
    before = workers.snaps[1].nbytes
    network = workers.networks.of(0)
    for request in absurd_requests():
        channel = FramedChannel(network.dial(workers.addresses[1], 5), 5)
        channel.dial("", PURPOSE, 5)
        channel.send(*request)
        with contextlib.suppress(ConnectionError):
            assert channel.receive().kind in (REFUSED, NOT_HELD)
        channel.close()
    workers.step(5)
    assert workers.snaps[1].nbytes == before
    assert workers.snaps[1].holdings().copies == {0: [4, 5]}


def test_who_does_not_know_the_token_is_refused(networks):
    server = SnapshotServer(networks.of(1), token="secret")
    knows, guesses = (SnapshotServer(networks.of(0), token=token) for token in ("secret", "guess"))
    for other, works in ((knows, True), (guesses, False)):
        snaps = Snapshots(other, rank=0, peers=[1], timeout_s=30)
        snaps.place({1: server.address})
        snaps.take(state(1), 1, 0)
        with contextlib.nullcontext() if works else pytest.raises(PeerLost, match="token"):
            snaps.wait()
        snaps.close()
    guesses.place({1: server.address})
    with pytest.raises(PeerLost, match=r"logical rank 1 at .*: has another token: it does not belong to this run"):
        guesses.fetch(1, Mark(0, 4), "owned", 1, None)
    for each in (server, knows, guesses):
        each.close()


def test_buffers_are_allocated_once(crew):
    workers = crew(2, steps=(0, 1))

    def allocated(*steps):
        slots = [server.stock.find(rank, step) for server in workers.servers for rank in range(2) for step in steps]
        return [id(slot.parts["owned"].buffer) for slot in slots], [server.stock.nbytes() for server in workers.servers]

    before = allocated(0, 1)
    for step in range(2, 52):
        workers.step(step)
    assert allocated(50, 51) == before
    workers.close()
    assert [server.stock.nbytes() for server in workers.servers] == [{"own": 0, "copies": 0}] * 2


def hold(network: str) -> None:
    """A peer in a process of its own; ends when its parent does."""
    server = SnapshotServer(from_text(network))
    Snapshots(server, rank=1, peers=[])
    print("address", server.address, flush=True)
    time.sleep(600)


def test_a_stopped_peer_ends_the_wait_at_its_limit_and_can_be_settled(ranks, networks):
    handle = ranks.start(hold, 1, networks.text(1), init=False)
    server = SnapshotServer(networks.of(0))
    snaps = Snapshots(server, rank=0, peers=[1], timeout_s=20)
    handle.wait_for_output(0, "address")
    snaps.place({1: handle.output(0).split()[-1]})
    live = state(1, mib=40)
    snaps.take(live, 1, 0)
    snaps.wait()
    handle.kill(0, signal.SIGSTOP)
    take_alone(snaps, live, 2, why="no answer within")
    assert snaps.holdings().own == [1, 2]
    assert snaps.lag == 1
    snaps.close()
    server.close()
    handle.close()


def send_for_ever(address: str, network: str) -> None:
    """A worker that takes one snapshot after the other, of 20 MiB."""
    server = SnapshotServer(from_text(network))
    snaps = Snapshots(server, rank=0, peers=[1])
    snaps.place({1: address})
    live = state(0, mib=20)
    for step in range(100000):
        snaps.take(set_to(live, step), step, 0)
        snaps.wait()


def test_a_sender_killed_in_mid_transfer_leaves_a_sound_copy(ranks, networks):
    server = SnapshotServer(networks.of(1))
    snaps = Snapshots(server, rank=1, peers=[])
    rng = random.Random()
    for _ in range(4):
        server.stock.copies(0).close()
        handle = ranks.start(send_for_ever, 1, server.address, networks.text(0), init=False)
        eventually(lambda: snaps.holdings().copies.get(0, [0])[-1] >= 2, pause_s=0.001)
        time.sleep(rng.random() * 0.02)
        handle.kill(0)
        handle.wait(timeout=180)
        snaps.settle()
        (newest,) = snaps.holdings().copies[0][-1:]
        slot = server.stock.find(0, newest)
        assert slot.damage() is None
        assert (slot.parts["owned"].tensors()[0] == newest).all()
    snaps.close()
    server.close()
