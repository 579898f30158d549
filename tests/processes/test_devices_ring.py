"""FT-HSDP's ring and its exchange of gradients on the model of CUDA: waits order all accesses of streams and host."""

import contextlib
import random
from types import SimpleNamespace

import pytest
import torch
from bucket_groups import RANK, LateRing, Nccl, group_of, shard_of
from cuda_model import Cuda, Stuck
from ring_neighbours import Neighbours, Poller, whole_numbers
from test_devices_snapshot import fails

from ft.systems.hsdp.exchange import Exchange
from ft.systems.hsdp.ring import RingOptions
from ft.systems.hsdp.ring.flow import Reducer
from ft.systems.hsdp.ring.staging import when_queued
from ft.systems.spare.ledger import GradientStore
from megatron.core.distributed import param_and_grad_buffer as core
from megatron.patches import registry, replace, replicas

OVERLAPPED, INSTANCES = {"overlap": True, "instances": 1}, {"overlap": True, "instances": 2}


def reduce_once(seed: int, without: str | None = None) -> Cuda:
    """Do two all-reduces of a tensor that the compute stream writes before and reads after each, in a drawn shape."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    members, dtype = draw.choice((2, 3, 4)), draw.choice((torch.float32, torch.bfloat16))
    options = RingOptions(64, draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 3)))
    size, me, scale = draw.randint(1, 200), draw.randrange(members), draw.choice((1.0, 0.5))
    with Cuda(seed, without=without) as cuda:
        tensor = cuda.tensor(torch.zeros(size, dtype=dtype))
        reducer = Reducer(Poller(cuda), options, cuda.breathe, lambda: None)
        for _ in range(2):
            values = [whole_numbers(generator, size, dtype) for _ in range(members)]
            ring = Neighbours(cuda, values, me, options, scale)
            tensor.copy_(cuda.tensor(values[me]))  # the gradients, computed on the current stream
            queued = when_queued(tensor.device)
            with cuda.thread():
                reducer.await_ready(tensor, queued, cuda.breathe)
                reducer.reduce(tensor, scale, ring, me, members)
            assert torch.equal(tensor.clone().cpu(), ring.result())
        assert not cuda.foreign
    return cuda


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 5000), marks=pytest.mark.long)], ids=str)
def test_all_orders_of_copies_additions_and_network_give_the_sum_and_no_race(seeds):
    for seed in seeds:
        print("seed", seed)
        reduce_once(seed)


@pytest.mark.parametrize("without", ["when_queued.<locals>.<lambda>", "Staged.added"])
def test_every_wait_of_the_staging_is_needed_and_the_model_sees_that_it_is_missing(without):
    assert any(fails(reduce_once, seed, without) for seed in range(30))


def test_the_staging_waits_nowhere_else():
    sites = set().union(*(reduce_once(seed).sites for seed in range(10)))
    # The ring's thread also waits until the tensor is ready before it begins, so that it can be cancelled meanwhile.
    assert sites == {"when_queued.<locals>.<lambda>", "Staged.added", "Reducer.await_ready"}


@pytest.fixture
def patched(monkeypatch):
    """Patches megatron-core as FT-HSDP does, for one test."""
    for name in ("start_grad_sync", "finish_grad_sync"):
        monkeypatch.setattr(core._ParamAndGradBucketGroup, name, getattr(core._ParamAndGradBucketGroup, name))
    monkeypatch.setattr(replace, "_originals", {})
    registry.put(replicas.PATCHES)
    return monkeypatch


class Training:
    """Steps of a rank that exchanges gradients: backward pass, core's reductions, exchange, and the update.

    Args:
        seed: draws shapes, values and orders.
        overlap: whether core reduces during the backward pass.
        instances: core's --num-distributed-optimizer-instances.
        keeps: whether gradients are kept for another attempt, as SPARe does.
    """

    def __init__(self, patched, cuda: Cuda, seed: int, *, overlap: bool, instances: int, keeps: bool = False):
        self.cuda, self.draw = cuda, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        nccl = self.nccl = Nccl(cuda)
        patched.setattr(core, "_coalescing_manager", nccl.coalescing)
        patched.setattr(core, "dist_reduce_scatter_func", nccl.reduce_scatter)
        patched.setattr(torch.distributed, "all_reduce", nccl.all_reduce)
        sizes = [[2 * self.draw.randint(1, 40) for _ in range(1 if overlap else 2)] for _ in range(3)]
        self.groups = [group_of(cuda, nccl, each, overlap=overlap, instances=instances) for each in sizes]
        self.weights = [[cuda.tensor(torch.zeros(shard_of(b).shape)) for b in g.buckets] for g in self.groups]
        self.ring = LateRing(cuda)
        self.exchange = Exchange(self.ring, self.groups, contextlib.nullcontext)
        self.keeps, self.store = keeps, GradientStore()
        for group in self.groups:
            setattr(group, replicas._ATTRIBUTE, self.exchange)

    def step(self, fails: bool = False) -> None:
        exchange, store = self.exchange, self.store
        self.ring.reconnect()
        exchange.begin()
        if self.keeps:
            store.begin((0,), 1.0)
            take = SimpleNamespace(kept=store.entering, reduced=lambda tokens: store.take_all(), is_apart=False)
            exchange.work = take
        expected, opens = [], self.draw.randrange(4)
        self.ring.breaks = fails
        for at, group in enumerate(self.groups):
            if at == opens:
                self.open()
            expected.append([self.backward(bucket) for bucket in group.buckets])
            if group.ddp_config.overlap_grad_reduce:
                group.start_grad_sync()
            self.perhaps()
        if opens >= len(self.groups):
            self.open()
        for group in self.groups:
            group.grad_reduce_finished = False
            group.finish_grad_sync()
        assert bool(exchange.problem) == fails, exchange.problem
        if not fails:
            self.update(expected)

    def open(self) -> None:
        with self.cuda.thread():
            self.exchange.open(0.5)

    def perhaps(self) -> None:
        if self.draw.random() < 0.5:
            self.ring.go_on()

    def backward(self, bucket) -> torch.Tensor:
        """Compute the gradients of a bucket; return what they are after all reductions."""
        shard, key = shard_of(bucket), shard_of(bucket).data_ptr()
        own, other, theirs = (
            whole_numbers(self.generator, size, torch.float32)
            for size in (bucket.grad_data.numel(), shard.numel(), shard.numel())
        )
        bucket.grad_data.zero_()
        bucket.grad_data.add_(self.cuda.tensor(own))
        self.nccl.others[key] = self.cuda.tensor(other)
        self.ring.mine[key] = own.view(2, -1)[RANK] + other
        self.ring.theirs[key] = theirs
        return (self.ring.mine[key] + theirs) / 2

    def update(self, expected: list) -> None:
        for group, weights, wanted in zip(self.groups, self.weights, expected, strict=True):
            for bucket, weight, want in zip(group.buckets, weights, wanted, strict=True):
                weight.copy_(shard_of(bucket))
                assert torch.equal(weight.cpu(), want)


SHAPES = [OVERLAPPED, INSTANCES, {"overlap": False, "instances": 1}, {"overlap": False, "instances": 2}]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(f"{k}={v}" for k, v in shape.items()))
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(1000, 1500), marks=pytest.mark.long)], ids=str)
def test_gradients_are_reduced_then_exchanged_and_then_used(patched, shape, keeps, seeds):
    for seed in seeds:
        print("seed", seed)
        train(patched, seed, shape, keeps)


def train(patched, seed: int, shape: dict, keeps: bool, without: str | None = None) -> Cuda:
    with Cuda(seed, without=without) as cuda:
        training = Training(patched, cuda, seed, **shape, keeps=keeps)
        for fails in (False, True, False):
            training.store.clear()
            training.step(fails)
        assert not cuda.foreign
    return cuda


@pytest.mark.parametrize("without", ["_Reduction.wait", "Reducer.settle", "Staged.added"])
def test_a_missing_wait_of_an_overlapped_reduction_is_seen(patched, without):
    assert any(fails(train, patched, seed, OVERLAPPED, False, without) for seed in range(30))


@pytest.mark.parametrize("without", ["_QueuedReduction.wait", "Reducer.settle"])
def test_a_missing_wait_for_cores_communication_stream_is_seen(patched, without):
    assert any(fails(train, patched, seed, INSTANCES, False, without) for seed in range(30))


def test_the_exchange_of_a_group_does_not_wait_for_the_rest_of_the_backward_pass(patched):
    with Cuda(1) as cuda:
        training = Training(patched, cuda, 1, **OVERLAPPED)
        training.open()
        wanted = training.backward(training.groups[0].buckets[0])
        training.groups[0].start_grad_sync()
        cuda.synchronize()
        cuda.default.is_frozen = True  # the GPU is busy with what the compute stream has got before
        later = training.groups[1].buckets[0].grad_data.add_(1)
        (exchanged,) = training.exchange._pending
        assert exchanged.wait().ok
        assert torch.equal(cuda.values(shard_of(training.groups[0].buckets[0])), wanted)
        assert not cuda.values(later).any()


@pytest.mark.parametrize("shape", [OVERLAPPED, INSTANCES], ids=["one", "two"])
def test_the_backward_pass_does_not_wait_for_the_reductions(patched, shape):
    with Cuda(1) as cuda:
        training = Training(patched, cuda, 1, **shape)
        training.open()
        training.backward(training.groups[0].buckets[0])
        training.nccl.inside.is_frozen = True  # another rank is late
        training.groups[0].start_grad_sync()
        with pytest.raises(Stuck):
            training.exchange._pending[0].wait()
        later = training.groups[1].buckets[0].grad_data.add_(1)
        cuda.default.synchronize()
        assert cuda.values(later).all()


def test_a_group_that_core_finishes_twice_counts_once(patched):
    with Cuda(1) as cuda:
        training = Training(patched, cuda, 1, **OVERLAPPED)
        training.open()
        for group in training.groups:
            for bucket in group.buckets:
                training.backward(bucket)
            group.start_grad_sync()
            group.finish_grad_sync()
            if group is training.groups[0]:
                training.exchange.finished(group)  # as core 0.19.2 does, to free memory early
        assert not training.exchange.problem and training.ring.is_idle
