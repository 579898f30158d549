"""The copy of a lost worker's snapshot is fetched while its successor is built."""

import threading
import time

import pytest
from snapshot_crew import set_to, state

from ft.base.errors import EpochClosed
from ft.job.parts import Source
from ft.state import transfer
from ft.state.snapshot import Snapshots, SnapshotServer
from ft.state.snapshot.buffers import Spare


class Successor:
    """A worker that takes over logical rank 0 of a crew, whose copies ranks 1 and 2 hold."""

    def __init__(self, workers, holders=(1, 2)):
        self.live = state(9, replicated=0)
        self.server = SnapshotServer(workers.networks.of(0), patience_s=5)
        addresses = {rank: workers.addresses[rank] for rank in holders}
        self.server.fetch_ahead(0, 1, addresses)
        self.snaps = Snapshots(self.server, rank=0, peers=[1, 2])
        self.snaps.place(addresses)

    @property
    def fetch(self) -> threading.Thread:
        return self.server._ahead[1]._thread

    def restore(self, step, holder=1):
        return self.snaps.restore(self.live, step, Source(holder, 0), epoch=1)["owned"]

    def is_at(self, step):
        return all(bool((tensor == step).all()) for tensor in self.live.owned.values())

    def close(self):
        self.snaps.close()
        self.server.close()


@pytest.fixture
def workers(crew):
    """Yield three workers after step 6, each with two copies of its snapshots on others, and nothing replicated."""
    made = crew(3, copies=2)
    made.live = [state(0, replicated=0) for _ in made.live]
    for step in (5, 6):
        made.step(step)
    return made


@pytest.fixture
def successor(workers):
    made = []

    def make(**how):
        made.append(Successor(workers, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_was_fetched_is_restored_though_its_holder_is_gone_by_then(workers, successor):
    joiner = successor()
    joiner.fetch.join(20)
    for server in workers.servers:
        server.close()
    assert joiner.restore(6) == "copy:1" and joiner.is_at(6)
    assert joiner.snaps.holdings().own == [6]
    assert joiner.snaps.restored_envelope.envelope["extra"] == {"at": 6}
    joiner.snaps.peers = []
    joiner.snaps.take(set_to(joiner.live, 7), 7, 1)
    joiner.snaps.wait()
    assert joiner.snaps.holdings().own == [6, 7]


def test_memory_that_is_ready_is_used_and_both_snapshots_of_a_killed_worker_can_still_be_inherited(workers, successor):
    joiner = successor(holders=())
    joiner.server.stock.own.spare = spare = Spare(8 << 20)
    joiner.server.fetch_ahead(0, 1, {1: workers.addresses[1]})
    joiner.fetch.join(20)
    left = workers.servers[0].stock.own._slots
    for slot in left:
        joiner.server.stock.own.inherit(slot)
    assert joiner.snaps.holdings().own == [5, 6] and joiner.server.stock.own.spare is None
    assert joiner.restore(6, holder=0) == "own" and joiner.is_at(6)  # the control plane counts on what was inherited
    assert spare.memory.closed is False and not joiner.server._ahead


@pytest.mark.parametrize(("step", "is_damaged", "how"), [(5, False, "copy:1"), (6, True, "copy:2")])
def test_another_step_than_the_newest_and_one_whose_copy_is_damaged_are_fetched_as_without(
    workers, successor, step, is_damaged, how
):
    if is_damaged:
        workers.snaps[1].corrupt(owner=0)
    joiner = successor()
    joiner.fetch.join(20)
    assert joiner.restore(step) == how and joiner.is_at(step)


def test_nobody_waits_for_a_holder_that_does_not_answer(workers, successor, monkeypatch):
    asked, offer = threading.Event(), transfer.OpenSource.offer

    def silent(source, wanted, section=""):
        if source.address == workers.addresses[1]:
            asked.set()
            while source._cut is None:
                time.sleep(0.01)
            raise transfer.SourceLost(source._cut)
        return offer(source, wanted, section)

    monkeypatch.setattr(transfer.OpenSource, "offer", silent)
    joiner = successor()
    assert asked.wait(20)
    assert joiner.restore(6, holder=2) == "copy:2" and joiner.is_at(6)


def test_the_end_of_the_epoch_ends_the_fetch_too(workers, successor, monkeypatch):
    begun = threading.Event()

    def slow(source, piece, into):
        begun.set()
        while source._cut is None:
            time.sleep(0.01)
        raise transfer.SourceLost(source._cut)

    monkeypatch.setattr(transfer.OpenSource, "receive", slow)
    joiner = successor()
    assert begun.wait(20)
    joiner.snaps.interrupt(1, "a fault")
    joiner.fetch.join(20)
    assert not joiner.fetch.is_alive()
    with pytest.raises(EpochClosed):
        joiner.restore(6)
