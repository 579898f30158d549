"""Snapshots on the model of CUDA: the copies are ordered by waits, and do not hold training up."""

import contextlib
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from cuda_model import Cuda, Race

from ft.net.framed import Mark
from ft.state.fetch.server import StateOffer
from ft.state.layout import table_of
from ft.state.snapshot import buffers, copier
from ft.state.snapshot.buffers import HostBuffer, PingPong
from ft.state.snapshot.copier import Copier, CopyPlan, device_of, tables_of, write_back
from ft.state.snapshot.state import OWNED, REPLICATED


class LateThread:
    """Stands for the copier's thread, which runs when a test lets it."""

    def __init__(self, target, **_):
        self.run = target

    def start(self) -> None:
        """Do nothing: the test calls ``run``."""

    def join(self) -> None:
        """Do nothing: there is no thread."""


@pytest.fixture
def late(monkeypatch):
    """Lets tests run the copier's thread, and tells the model which bytes checksums read."""
    plain = buffers.checksum

    def checksum(data) -> int:
        if Cuda.active is not None and isinstance(data, memoryview):
            Cuda.active.reads_on_host(data, "a checksum")
        return plain(data)

    monkeypatch.setattr(copier, "threading", SimpleNamespace(**vars(threading) | {"Thread": LateThread}))
    monkeypatch.setattr(buffers, "checksum", checksum)


def live_state(cuda: Cuda, draw: random.Random) -> dict[str, dict[str, torch.Tensor]]:
    def tensor() -> torch.Tensor:
        shape = draw.choice(((draw.randint(1, 300),), (draw.randint(1, 20), draw.randint(1, 20))))
        made = torch.zeros(shape)
        made = cuda.tensor(made) if draw.random() < 0.8 else made  # an optimizer may keep some state on the host
        return made.t() if len(shape) == 2 and draw.random() < 0.3 else made

    return {section: {str(at): tensor() for at in range(draw.randint(1, 4))} for section in (OWNED, REPLICATED)}


def train_with_snapshots(seed: int, without: str | None = None) -> Cuda:
    """Update, snapshot and update again for some steps; then restore the last snapshot."""
    draw = random.Random(seed)
    with Cuda(seed, without=without) as cuda:
        state, held, plans, taker = live_state(cuda, draw), PingPong(), {}, Copier()
        tables = tables_of(state)
        held.pinned = device_of(state) is not None
        for step in range(1, 5):
            for tensors in state.values():
                for tensor in tensors.values():
                    tensor.fill_(step)
            slot = held.begin(step, 0, tables, own=True)
            plan = plans.setdefault(id(slot), CopyPlan(slot, state))
            progress = taker.start(plan, lambda error, slot=slot: held.commit(slot))
            forward = [tensor * 2 for tensors in state.values() for tensor in tensors.values()]
            taker._jobs.put(None)
            with cuda.thread():
                taker._run()
            progress.wait()
            assert progress.error is None and slot.damage() is None and len(forward)
            assert all(torch.equal(t, torch.full_like(t, step)) for part in slot.parts.values() for t in part.tensors())
        write_back(held.find(3), state)
        assert all((tensor.cpu() == 3).all() for tensors in state.values() for tensor in tensors.values())
        assert not cuda.blocked and not cuda.foreign, (cuda.blocked, cuda.foreign)
    return cuda


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(1000, 3000), marks=pytest.mark.long)], ids=str)
def test_snapshots_hold_the_state_of_their_step_and_nothing_blocks(late, seeds):
    for seed in seeds:
        print("seed", seed)
        train_with_snapshots(seed)


@pytest.mark.parametrize("without", ["Copier._queue_on_device", "_fill"])
def test_every_wait_of_the_copier_is_needed_and_the_model_sees_that_it_is_missing(late, without):
    assert any(fails(train_with_snapshots, seed, without) for seed in range(20))


def fails(run, *arguments, how=(Race, AssertionError)) -> bool:
    """Whether the model finds a run wrong."""
    try:
        run(*arguments)
    except how:
        return True
    return False


def test_copies_to_memory_that_is_not_pinned_block_in_the_model(late, monkeypatch):
    monkeypatch.setattr(HostBuffer, "pin", lambda self: None)
    with pytest.raises(AssertionError, match="not pinned"):
        train_with_snapshots(0)


def test_pinned_memory_has_the_size_that_was_asked_for_and_is_unlocked_before_it_is_freed():
    with Cuda(0) as cuda:
        buffer = HostBuffer(3 << 20, pinned=True)
        assert cuda._pinned == [(buffer.tensor.data_ptr(), buffer.tensor.data_ptr() + (3 << 20))]
        kept = buffer.tensor[5:]
        del buffer
        assert cuda._pinned, "a tensor still has the memory"
        with cuda.thread():
            del kept
        assert not cuda._pinned and not cuda.foreign


def test_memory_that_was_allocated_for_a_received_snapshot_is_pinned_for_the_next_own_one():
    with Cuda(0) as cuda:
        held, tables = PingPong(), tables_of({OWNED: {"a": cuda.tensor(torch.zeros(9))}})
        for step in (1, 2):
            held.commit(held.begin(step, 0, tables))
        assert not cuda._pinned
        held.pinned = True
        for step in (3, 4):
            held.commit(held.begin(step, 0, tables, own=True))
        assert len(cuda._pinned) == 2


def test_a_state_is_given_to_other_replicas_as_it_was_when_it_was_offered():
    for seed in range(40):
        with Cuda(seed) as cuda:
            tensors = {str(at): cuda.tensor(torch.zeros(size)) for at, size in enumerate((5, 70))}
            for tensor in tensors.values():
                tensor.fill_(seed)
            table = table_of(tensors)
            offer = StateOffer(Mark(0, 1, 0), "", b"{}", table, tensors, {})
            ahead, sent = [tensor + 1 for tensor in tensors.values()], bytearray(table.nbytes)
            with cuda.thread(), contextlib.nullcontext(ahead), offer.reading(None) as memory:
                memory.gather(0, table.nbytes, memoryview(sent))
            places = (slice(entry.offset, entry.offset + entry.nbytes) for entry in table.entries)
            sent = [torch.frombuffer(sent[place], dtype=torch.float32) for place in places]
            assert all((tensor == seed).all() for tensor in sent) and not cuda.foreign
