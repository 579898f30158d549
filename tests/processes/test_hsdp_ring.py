"""The fault-tolerant all-reduce: its arithmetic, and rings of members in one process."""

import threading

import pytest
import torch
from cuda_model import Cuda
from rings import gather, ring_members

from ft.base.errors import EpochClosed, UserError
from ft.systems.hsdp.ring import Ring, RingOptions, numbers
from ft.systems.hsdp.ring.numbers import Buffers, items
from ft.systems.hsdp.ring.staging import Staged, Staging


@pytest.fixture
def members():
    with ring_members() as make:
        yield make


def reduce(rings: list[Ring], tensors: list[torch.Tensor], scale: float = 1.0) -> list:
    pending = [ring.all_reduce(tensor, scale) for ring, tensor in zip(rings, tensors, strict=True)]
    return [each.wait() for each in pending]


def in_ring_order(tensors: list[torch.Tensor], scale: float, options: RingOptions) -> torch.Tensor:
    """The sum as the ring defines it: each part begins with the member of its index and goes round to the right."""
    count, size = len(tensors), tensors[0].numel()
    total = torch.empty(size)
    partition = options.chunk_bytes // 4 * options.chunks * count
    for first in range(0, size, partition):
        behind = min(first + partition, size)
        for part in range(count):
            low = first + (behind - first) * part // count
            high = first + (behind - first) * (part + 1) // count
            running = tensors[part][low:high].float()
            for step in range(1, count):
                running = running + tensors[(part + step) % count][low:high].float()
            total[low:high] = running * torch.tensor(scale)
    return total.to(tensors[0].dtype)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
@pytest.mark.parametrize("elements", [1, 5, 64, 1000, 4097])
def test_every_element_is_sent_in_every_step_but_its_own_parts(count, elements):
    plans = [items(elements, count, me, 16, 3) for me in range(count)]
    for me, plan in enumerate(plans):
        right = plans[(me + 1) % count]
        assert [item.send for item in plan] == [item.receive for item in right]
        assert all(high - low <= 16 for item in plan for low, high in (item.send, item.receive))
        for index, item in enumerate(plan):
            assert item.needs < index
            if item.needs >= 0:
                assert plan[item.needs].receive == item.send
                assert plan[item.needs].step == item.step - 1
    received = [sum(high - low for item in plan for low, high in [item.receive]) for plan in plans]
    assert sum(received) == elements * (2 * count - 2)


def test_at_most_c_chunks_of_a_part_are_between_a_chunk_and_what_it_needs():
    plan = items(10_000, 4, 1, 16, 3)
    assert max(index - item.needs for index, item in enumerate(plan) if item.needs >= 0) <= 3


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("streams", [1, 3])
def test_all_members_get_the_sum_in_the_rings_order_bit_for_bit(members, count, streams, seed):
    torch.manual_seed(seed)
    options = RingOptions(chunk_bytes=4096, chunks=2, streams=streams, limit_s=20)
    rings = members(count, options)
    gather(rings, 1)
    for dtype in (torch.float32, torch.bfloat16):
        for size in (0, 1, 2, 5, 1023, 1024 * 2 * count, 20_011):
            tensors = [torch.randn(size).to(dtype) for _ in range(count)]
            wanted = in_ring_order(tensors, 1 / 3, options) if size else tensors[0].clone()
            assert all(outcome.ok for outcome in reduce(rings, tensors, 1 / 3))
            assert all(torch.equal(tensor, wanted) for tensor in tensors), (dtype, size)


def test_a_tensor_of_any_shape_is_reduced_in_place(members):
    rings = members(2)
    gather(rings, 1)
    whole = [torch.arange(60.0).view(3, 4, 5) for _ in rings]
    assert all(outcome.ok for outcome in reduce(rings, [each[1] for each in whole]))
    for each in whole:
        assert torch.equal(each[1], torch.arange(20.0, 40.0).view(4, 5) * 2)
        assert torch.equal(each[0], torch.arange(20.0).view(4, 5))


def test_queued_operations_are_done_in_order_each_after_its_own_condition(members):
    rings = members(3)
    gather(rings, 1)
    gate, log = threading.Event(), []
    tensors = [[torch.full((3000,), float(me + 10 * turn)) for turn in range(5)] for me in range(3)]

    def wait_for_gate(turn):
        gate.wait(10)
        log.append(turn)

    pending = []
    for me, ring in enumerate(rings):
        for turn, tensor in enumerate(tensors[me]):
            after = (lambda turn=turn: wait_for_gate(turn)) if me == 1 else None
            pending.append(ring.all_reduce(tensor, after=after))
    assert not any(each.done() for each in pending)
    gate.set()
    assert all(each.wait().ok for each in pending)
    assert log == [0, 1, 2, 3, 4]
    for turn in range(5):
        assert all(torch.equal(mine[turn], torch.full((3000,), 3.0 + 30 * turn)) for mine in tensors)


def test_what_cannot_be_reduced_is_refused_with_words(members):
    (ring,) = members(1)
    ring.reconfigure(1, [ring.address], 0)
    for tensor in (torch.zeros(3, dtype=torch.int32), torch.zeros(4, 4).t()[:2]):
        with pytest.raises(UserError):
            ring.all_reduce(tensor)
    with pytest.raises(UserError):
        ring.all_reduce(torch.zeros(1), scale=float("nan"))
    with pytest.raises(UserError, match="only grow"):
        ring.reconfigure(1, [ring.address], 0)
    with pytest.raises(UserError, match="not this one"):
        ring.reconfigure(2, ["127.0.0.1:1", ring.address], 0)
    with pytest.raises(UserError):
        Ring("127.0.0.1", "secret", RingOptions(chunk_bytes=9))
    with pytest.raises(UserError):
        ring.expect(0)


def test_members_that_mean_different_operations_are_told_so(members):
    rings = members(2)
    gather(rings, 1)
    pending = [ring.all_reduce(torch.zeros(size)) for ring, size in zip(rings, (5, 7), strict=True)]
    told = 0
    for each in pending:
        try:
            assert not each.wait().ok
        except UserError as error:
            told += 1
            assert "5 elements" in str(error) and "7 elements" in str(error)
    assert told


def test_an_error_before_an_operation_reaches_its_caller_and_fails_it_for_all(members):
    rings = members(3)
    gather(rings, 1)

    def fail():
        raise ZeroDivisionError("of the caller's")

    pending = [ring.all_reduce(torch.zeros(10), after=fail if me == 1 else None) for me, ring in enumerate(rings)]
    with pytest.raises(ZeroDivisionError):
        pending[1].wait()
    for each in (pending[0], pending[2]):
        outcome = each.wait()
        assert not outcome.ok and outcome.suspect == 1
    assert rings[1].all_reduce(torch.zeros(10)).wait().skipped


def test_a_recoverable_error_before_an_operation_is_an_outcome(members):
    rings = members(2)
    gather(rings, 1)

    def leave():
        raise EpochClosed(3, "a worker is lost")

    pending = [ring.all_reduce(torch.zeros(10), after=leave if me == 0 else None) for me, ring in enumerate(rings)]
    assert "epoch 3" in pending[0].wait().reason
    assert pending[1].wait().suspect == 0


def test_nothing_works_before_the_first_quorum_and_everything_ends_with_the_ring(members):
    (ring,) = members(1)
    assert ring.all_reduce(torch.zeros(3)).wait().skipped
    ring.close()
    assert ring.all_reduce(torch.zeros(3)).wait().skipped
    ring.close()


class Carrier:
    """Carries the chunks of all members of a ring as their sockets do, as late as it may, and checks the room."""

    def __init__(self, plans, numbers):
        self._plans, self._numbers = plans, numbers

    def run(self) -> None:
        count, total = len(self._plans), len(self._plans[0])
        sent, received = [0] * count, [0] * count
        while min(received) < total:
            before = sum(received)
            for me in range(count):
                right, index = (me + 1) % count, sent[me]
                received[me] += len(self._numbers[me].added(wait=False))
                if index >= total or not self._is_there(me, index, received[me]):
                    continue
                item = self._plans[right][index]
                if received[right] != index or not self._numbers[right].has_room(index, item, sent[right]):
                    continue
                mine = self._plans[me][index]
                self._numbers[right].incoming(index, item, 0)[:] = self._numbers[me].outgoing(index, mine)
                self._numbers[me].went(index, mine)
                sent[me] += 1
                received[right] += self._numbers[right].take(index, item, 0)
            assert sum(received) > before, "no member can go on"

    def _is_there(self, me: int, index: int, received: int) -> bool:
        needs = self._plans[me][index].needs
        return needs < received if needs >= 0 else self._numbers[me].can_send(index)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_that_go_through_staging_buffers_give_the_same_bits(count, dtype):
    chunk, chunks, size = 64, 2, 3001
    torch.manual_seed(count)
    tensors = [torch.randn(size).to(dtype) for _ in range(count)]
    plans = [items(size, count, me, chunk, chunks) for me in range(count)]

    direct = [tensor.clone() for tensor in tensors]
    Carrier(plans, [numbers.of(each, 1 / 3, count, Buffers(chunk, chunks, 1)) for each in direct]).run()
    with Cuda(0, is_eager=True) as cuda:
        on_device, options = [cuda.tensor(tensor) for tensor in tensors], RingOptions(4 * chunk, chunks)
        staged = [
            Staged(each, 1 / 3, count, Staging(each.device, options), plan)
            for each, plan in zip(on_device, plans, strict=True)
        ]
        Carrier(plans, staged).run()
        through = [cuda.values(each) for each in on_device]
    assert all(torch.equal(each, direct[0]) for each in direct + through)
