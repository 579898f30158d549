"""The trainer's side of FT-HSDP, mostly in one process: the exchange, when a ring is kept, what a position holds."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist

from ft.base.errors import FtError
from ft.protection.contract import Layer
from ft.protection.position import StepCounter
from ft.systems.hsdp.exchange import Exchange
from ft.systems.hsdp.ring import Ring
from ft.systems.hsdp.samples import KEY, ReplicaPosition, SampleAssignment
from ft.systems.hsdp.work import Work

TOKEN = "the token of the test"
LIMIT_S = 20.0


@pytest.fixture
def rings():
    made = [Ring("127.0.0.1", TOKEN) for _ in range(2)]
    for me, ring in enumerate(made):
        ring.expect(LIMIT_S)
        ring.reconfigure(1, [each.address for each in made], me)
    yield made
    for ring in made:
        ring.close()


def exchange_of(ring, groups):
    return Exchange(ring, groups, contextlib.nullcontext)


def both(aside, work, *given):
    """Call ``work`` for both replicas at once, with a value of ``given`` each; return what the calls return."""
    return [call.result(LIMIT_S) for call in [aside(work, *each) for each in zip((0, 1), *given, strict=True)]]


def test_replicas_that_complete_their_buckets_in_different_orders_exchange_them_all_the_same(rings, aside):
    groups = ["a", "b", "c"]
    parts = [{name: torch.full((5,), float(10**i) * (me + 1)) for i, name in enumerate(groups)} for me in (0, 1)]

    def replica(me, order):
        exchange = exchange_of(rings[me], groups)
        for name in order[:1]:
            exchange.started(name, [parts[me][name]], None)
        exchange.open(0.5)
        for name in order[1:]:
            exchange.started(name, [parts[me][name]], None)
        for name in groups:
            exchange.finished(name)
        assert not exchange.problem, exchange.problem

    both(aside, replica, (groups, groups[::-1]))
    for me in (0, 1):
        assert [parts[me][name][0].item() for name in groups] == [1.5, 15.0, 150.0]


def test_a_reduction_inside_the_replica_is_waited_for_before_its_buckets_go(rings, aside):
    tensors, reduced = [torch.ones(4), torch.ones(4)], threading.Event()

    def ends():
        assert reduced.wait(LIMIT_S)
        tensors[0].fill_(3.0)

    def replica(me):
        exchange = exchange_of(rings[me], ["a"])
        exchange.open(1.0)
        exchange.started("a", [tensors[me]], None if me else ends)
        if me == 0:
            reduced.set()
        exchange.finished("a")

    both(aside, replica)
    assert tensors[0].tolist() == tensors[1].tolist() == [4.0] * 4


def test_a_lost_peer_is_a_problem_and_no_exception_and_the_next_step_begins_clean(rings):
    exchange = exchange_of(rings[0], ["a"])
    exchange.open(1.0)
    rings[1].close()
    exchange.started("a", [torch.ones(1 << 20)], None)
    exchange.finished("a")
    assert exchange.problem and exchange.suspect == 1
    tensor = torch.ones(3)
    exchange.add_up(tensor)
    assert tensor.tolist() == [1.0] * 3
    exchange.begin()
    rings[0].reconfigure(2, [rings[0].address], 0)
    exchange.open(0.5)
    exchange.started("a", [tensor], None)
    exchange.finished("a")
    assert not exchange.problem and tensor.tolist() == [0.5] * 3


def test_without_a_quorum_nobody_waits_for_an_exchange(rings, aside):
    exchange = exchange_of(rings[0], ["a"])
    exchange.started("a", [torch.ones(2)], None)
    threading.Timer(0.1, lambda: exchange.give_up("no quorum")).start()
    aside(exchange.finished, "a").result(LIMIT_S)
    assert exchange.problem == "no quorum"


def test_sums_of_integers_are_exact_and_keep_their_type(rings, aside):
    tokens = [torch.tensor(12345, dtype=torch.int), torch.tensor(54321, dtype=torch.int)]

    def work(me):
        exchange = exchange_of(rings[me], [])
        exchange.open(1.0)
        exchange.add_up(tokens[me])

    both(aside, work)
    assert [int(each) for each in tokens] == [66666, 66666] and tokens[0].dtype == torch.int


def shards_of_fsdp2(other):
    """Train one step on two replicas of two ranks; return this rank's gradients as [whole of all, expected].

    Args:
        other: what replica 1 does: it "computes", "gives zeros" as one that catches up, or is "lost".
    """
    from megatron import patches
    from megatron.patches import step_state

    patches.apply()
    from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
    from megatron.core.transformer import TransformerConfig

    replica, place = divmod(dist.get_rank(), 2)
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][replica]
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))  # 5 rows and 1 on 2 ranks: unequal shards
    samples, parts = torch.randn(4, 3), [[0, 1], [2, 3]][: 2 if other == "computes" else 1]
    whole = [torch.autograd.grad(model(samples[part]).mean(), tuple(model.parameters())) for part in parts]
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, transformer_impl="local")
    chunk = TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), model, process_group=inside)
    if replica == 0 or other == "computes":
        chunk(samples[dist.get_rank()]).sum().backward()

    ring = Ring("127.0.0.1", TOKEN)
    addresses = [None] * 4
    dist.all_gather_object(addresses, ring.address)
    ring.expect(LIMIT_S)
    ring.reconfigure(1, addresses[place::2], replica)
    if replica and other == "lost":
        ring.close()
    exchange = exchange_of(ring, [])
    exchange.open(1.0 / len(parts))
    exchange.at_once(step_state.gradients([chunk]))
    assert bool(exchange.problem) == (other == "lost"), exchange.problem
    found = [param.grad.full_tensor() for param in chunk.module.parameters()]
    ring.close()
    return [(one.tolist(), (sum(wanted) / len(parts)).tolist()) for one, *wanted in zip(found, *whole, strict=True)]


@pytest.mark.parametrize("other", ["computes", "gives zeros", "lost"])
def test_each_rank_exchanges_its_own_shards_of_fsdp2(ranks, other):
    first, second, *others = ranks(shards_of_fsdp2, 4, other)
    for found, wanted in first:
        assert torch.tensor(found).allclose(torch.tensor(wanted), atol=1e-6)
    assert first == second and (other == "lost" or others == [first, first])


class Verifier(Layer):
    """Finds the gradients wrong as often as it is told to, and notes what had been sent by then."""

    verifies = True

    def __init__(self, ring, wrong=0):
        self.ring, self.wrong, self.sent = ring, wrong, []
        send = ring.all_reduce
        ring.all_reduce = lambda *args, **options: (self.sent.append(args), send(*args, **options))[1]

    def verify(self):
        assert not self.sent, "gradients were sent before they were verified"
        self.wrong -= 1
        if self.wrong >= 0:
            raise FtError("wrong")

    def digest(self, tensors):
        return torch.tensor([int(sum(each.sum().item() for each in tensors)), len(tensors)])


def test_verified_gradients_are_sent_after_the_verification_and_wrong_ones_never(rings, aside):
    tensors, models = [torch.full((4,), 1.0), torch.full((4,), 2.0)], [torch.ones(3), torch.ones(3)]
    names = ["a", "b"]

    def work(me):
        exchange = Exchange(
            rings[me], names, contextlib.nullcontext, Verifier(rings[me], wrong=2 * me), lambda: [models[me]]
        )
        exchange.work = Work(None)
        exchange.open(1.0, (me, 2))
        for attempt in range(3):
            exchange.is_repeated = False
            for name, part in zip(names, tensors[me].split(2), strict=True):
                part.fill_(me + 1.0 if attempt == 2 * me else float("nan"))
                exchange.started(name, [part], None)
            try:
                for name in names:
                    exchange.finished(name)
                break
            except FtError:
                assert exchange.is_repeated
        return exchange.problem, exchange.is_stale

    assert both(aside, work) == [("", False)] * 2
    assert tensors[0].tolist() == tensors[1].tolist() == [3.0] * 4


def test_replicas_whose_models_differ_give_the_step_up(rings, aside):
    def work(me):
        exchange = Exchange(
            rings[me], ["a"], contextlib.nullcontext, Verifier(rings[me]), lambda: [torch.full((3,), float(me))]
        )
        exchange.work = Work(None)
        exchange.open(1.0, (me, 2))
        exchange.started("a", [torch.ones(2)], None)
        exchange.finished("a")
        assert "no majority" in exchange.problem and exchange.is_stale
        exchange.begin()
        assert not exchange.is_stale

    both(aside, work)


def position_of(replica, counter, followed):
    follow = lambda assignment, position: followed.append((assignment, position))  # noqa: E731
    return ReplicaPosition(counter, lambda: counter.extra, replica, follow, SampleAssignment(2, 4), {})


def test_a_position_carries_the_samples_of_all_replicas_to_one_that_was_away():
    here, there, followed = StepCounter(), StepCounter(), []
    position, other = position_of(0, here, []), position_of(1, there, followed)
    here.step = 3
    position.advance((0, 1), 4, 11)
    position.advance((0,), 4, 12)
    other.set(position.get())
    assert other.positions == {0: 8, 1: 4} and other.lineage == 12 and other.mine == 4 and other.step == 3
    assert followed == [(SampleAssignment(2, 4), 4)] and there.extra[KEY]["positions"] == {"0": 8, "1": 4}
