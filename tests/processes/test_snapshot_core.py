"""Snapshots of real megatron-core objects: what is restored trains on bit for bit, in place and in fresh processes."""

import json
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

import plain_loop
import pytest
import torch
import torch.distributed as dist
from waiting import eventually

BEFORE, AFTER = 2, 2
"""Steps up to the snapshot, and after it."""

NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
DISTRIBUTED = {"use_distributed_optimizer": True}
CASES = tomllib.loads(Path(__file__).with_name("snapshot_core.toml").read_text())


class Trainee:
    """A plain trainer whose every step has its own batches, with snapshots; addresses are exchanged in ``folder``."""

    def __init__(self, setting, folder: str, side: str):
        from ft.protection.training_state import what_is_not_restored
        from ft.state.placement.assign import ring_of
        from ft.state.snapshot import Snapshots, SnapshotServer
        from ft.state.snapshot.capture import Capture
        from megatron.core import parallel_state

        self.trainer = plain_loop.PlainTrainer(setting)
        self.batches = []
        micro = setting.global_batch // setting.micro_batch // self.trainer.dp
        for _ in range(setting.steps):
            self.batches.append([[next(it) for _ in range(micro)] for it in self.trainer.iterators])
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.folder, self.side = Path(folder), side
        self.ring = dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.peers = ring_of(self.rank, self.ring, 1, self.world)
        self.server = SnapshotServer("127.0.0.1", patience_s=20)
        self.snaps = Snapshots(self.server, rank=self.rank, peers=self.peers, timeout_s=20)
        trainer = self.trainer
        assert list(what_is_not_restored(trainer.chunks, trainer.optimizer, trainer.scheduler)) == []
        self.capture = Capture(trainer.chunks, trainer.optimizer, trainer.scheduler, alone=len(self.ring) == 1)
        self.snaps.place(self.addresses(side, self.server.address))

    def addresses(self, side: str, own: str | None = None) -> dict[int, str]:
        """Everyone's address on one side; waits for them."""
        if own is not None:
            temporary = self.folder / f".{side}{self.rank}"
            temporary.write_text(own)
            os.rename(temporary, self.folder / f"{side}{self.rank}")
        files = {rank: self.folder / f"{side}{rank}" for rank in range(self.world)}
        eventually(lambda: all(f.exists() for f in files.values()), f"all addresses of {side} in {self.folder}", 150)
        return {rank: file.read_text() for rank, file in files.items()}

    def train(self, first: int, count: int) -> list:
        for step in range(first, first + count):
            self.trainer.iterators = [iter(batches) for batches in self.batches[step]]
            self.trainer.step()
        return list(zip(self.trainer.losses[-count:], self.trainer.grad_norms[-count:], strict=True))

    def restore(self, step: int, source, epoch: int) -> tuple[dict, dict]:
        from megatron.patches import step_state

        trainer = self.trainer
        if self.side == "b" and trainer.chunks[0].ddp_config.overlap_grad_reduce:
            for group in step_state.bucket_groups(trainer.chunks[0]):
                group.register_grad_ready(next(iter(group.params)))  # a first backward pass was interrupted
        step_state.abandon_step(trainer.chunks, trainer.optimizer)
        how = self.snaps.restore(self.capture.state({}), step, source, epoch=epoch)
        extra = self.capture.apply(self.snaps.restored_envelope)
        step_state.publish_parameters(trainer.chunks, trainer.optimizer)
        return how, extra

    def close(self) -> None:
        self.snaps.close()
        self.server.close()


def train_and_serve(setting, folder):
    """Side A: trains, goes back in place, and lets side B fetch; returns the figures of all three."""
    from ft.job.parts import Source

    torch.manual_seed(7)
    a = Trainee(setting, folder, "a")
    a.train(0, BEFORE)
    a.snaps.take(a.capture.state({"note": "extra"}), BEFORE, 0)
    a.snaps.wait()
    first = a.train(BEFORE, AFTER)
    how, extra = a.restore(BEFORE, Source(a.rank, a.rank), 0)
    assert (how["owned"], extra) == ("own", {"note": "extra"})
    second = a.train(BEFORE, AFTER)
    a.addresses("served", "")
    a.addresses("done")
    assert a.snaps.lag == 0
    a.close()
    return first, second


def join(setting, folder):
    """Side B, in fresh processes with other weights: restores from side A's peer copies and trains on."""
    from ft.job.messages import Source

    b = Trainee(setting, folder, "b")
    with torch.no_grad():
        for chunk in b.trainer.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                (buffer.param_data if buffer.param_data is not None else torch.empty(0)).fill_(0.5)
            for param in chunk.parameters():
                param.fill_(0.5)
    b.addresses("served")
    b.snaps.place(b.addresses("a"))
    how, extra = b.restore(BEFORE, Source(b.peers[0], b.peers[0]), 1)
    assert how["owned"] == f"copy:{b.peers[0]}", how
    third = b.train(BEFORE, AFTER)
    assert extra == {"note": "extra"}
    b.addresses("done", "")
    b.close()
    return third


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_restored_state_trains_on_bit_for_bit(case, ranks, corpus, tmp_path):
    world, setting = case["ranks"], plain_loop.Setting(corpus, steps=BEFORE + AFTER, **case["loop"])
    side_a = ranks.start(train_and_serve, world, setting, str(tmp_path))
    side_b = ranks.start(join, world, setting, str(tmp_path))
    b = side_b.wait(timeout=180, stop_at_failure=True)
    # Side A waits for side B to be done: B's failure is the cause of both and is told first.
    for outcome in b:
        assert outcome.exitcode == 0, outcome.error or outcome
    a = side_a.wait(timeout=180, stop_at_failure=True)
    for outcome in a:
        assert outcome.exitcode == 0, outcome.error or outcome
    for in_a, in_b in zip(a, b, strict=True):
        first, second = in_a.value
        assert str(second) == str(first)
        assert str(in_b.value) == str(first)


class KeepsWeights(torch.optim.SGD):
    """An optimizer whose state holds the weights themselves, which it updates, and the parameters."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, master_param=p.detach().clone(), itself=p.detach(), view=p.detach()[:1])
                state["step"] += 1
                state["master_param"].sub_(p.grad, alpha=group["lr"] / state["step"])
                p.detach().copy_(state["master_param"])


def offloading(parameters, fraction=1.0):
    """Return core's optimizer with this fraction of the parameters in the host's memory."""
    from megatron import patches

    patches.apply()
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    return HybridDeviceOptimizer(
        parameters,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        lr=0.1,
    )


OPTIMIZERS = {
    "weights in the state": lambda p: KeepsWeights(p, lr=0.1),
    "weights in the state, in core's offloading optimizer": offloading,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adam with coupled decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_made_ahead_changes_no_step(name):
    from ft.state.snapshot import optimizers

    def train(prepare):
        generator = torch.Generator().manual_seed(3)
        dtype = torch.bfloat16 if name.endswith("offloading optimizer") else torch.float32
        parameters = [torch.randn(5, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
        before = [p.detach().clone() for p in parameters]
        optimizer = OPTIMIZERS[name](parameters)
        prepare(optimizer)
        assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(5, generator=generator).to(dtype)
            optimizer.step()
        return parameters, optimizer

    (expected, _), (found, optimizer) = train(lambda optimizer: None), train(optimizers.allocate)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_weights_in_the_state_are_those_of_the_parameters_when_the_state_is_forgotten():
    from ft.state.snapshot import optimizers

    parameter = torch.randn(5, requires_grad=True)
    optimizer = KeepsWeights([parameter], lr=0.1)
    parameter.grad = torch.ones(5)
    optimizer.step()
    del optimizer.state[parameter]["itself"], optimizer.state[parameter]["view"]
    optimizer.state[parameter]["exp_avg"] = torch.ones(5)
    rebuilt = torch.randn(5)
    with torch.no_grad():
        parameter.copy_(rebuilt)
    optimizers.forget(optimizer)
    state = optimizer.state[parameter]
    assert torch.equal(parameter, rebuilt) and torch.equal(state["master_param"], rebuilt)
    assert state["step"] == 0 and not state["exp_avg"].any()


@pytest.mark.parametrize("fraction", [0.4, 1.0])
def test_weights_of_optimizers_on_the_host_are_copied_and_the_next_step_is_that_of_the_original(fraction):
    from ft.state.snapshot import optimizers
    from megatron.patches import step_state

    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        parameters = [torch.randn(5, generator=generator).bfloat16().requires_grad_() for _ in range(5)]
        optimizer = offloading(parameters, fraction)
        optimizers.allocate(optimizer)
        return parameters, optimizer

    (parameters, optimizer), (others, joiner) = made(1), made(2)
    assert len(optimizer.cpu_optimizers) == round(5 * fraction)
    for seed in range(3):
        update(parameters, optimizer, seed)
    theirs = {name: of[key] for name, _, of, key in optimizers.entries(optimizer)}
    assert sum(tensor.numel() for tensor in theirs.values()) == 5 * (3 * 5 + 1)  # weights, two moments; step counts
    with torch.no_grad():
        for name, _, of, key in optimizers.entries(joiner):
            of[key].copy_(theirs[name])
    groups = [optimizers.numbers(group) for group in optimizers.groups(optimizer)]
    for group, numbers in zip(optimizers.groups(joiner), groups, strict=True):
        optimizers.set_numbers(group, json.loads(json.dumps(numbers)))
    step_state.publish_parameters([], Part(joiner))
    assert all(map(torch.equal, parameters, others))
    for seed in range(3, 5):
        assert all(map(torch.equal, update(parameters, optimizer, seed), update(others, joiner, seed)))
    optimizers.forget(joiner)
    state = [state for holder in joiner.sub_optimizers for state in holder.state.values()]
    assert not any(each["exp_avg"].any() or each["exp_avg_sq"].any() or each["step"] for each in state)
    assert all(torch.equal(p, main.bfloat16()) for p, main in joiner.param_to_inner_param.items())


@dataclass
class Part:
    """A part of core's optimizer that has no model to publish to."""

    optimizer: torch.optim.Optimizer


def scaled(seed: int):
    """Return parameters and an optimizer that keeps scales outside of its state."""
    from scaled_adam import ScaledAdam

    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.randn(5, generator=generator).to(torch.bfloat16).requires_grad_() for _ in range(3)]
    return parameters, ScaledAdam(parameters)


def update(parameters, optimizer, seed: int) -> list:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.decoupled_grad = torch.randn(5, generator=generator) * 10.0**seed
    optimizer.step()
    return [p.detach().clone() for p in parameters]


def test_scales_outside_of_the_state_are_copied_and_the_next_step_is_that_of_the_original():
    from ft.state.snapshot import optimizers

    (plain, without), (parameters, optimizer) = scaled(1), scaled(1)
    optimizers.allocate(optimizer)
    for seed in range(3):
        assert all(map(torch.equal, update(plain, without, seed), update(parameters, optimizer, seed)))
    others, joiner = scaled(2)
    optimizers.allocate(joiner)
    theirs = {name: of[key] for name, _, of, key in optimizers.entries(optimizer)}
    assert sum(name.endswith(".scale") for name in theirs) == 9
    with torch.no_grad():
        for name, _, of, key in optimizers.entries(joiner):
            of[key].copy_(theirs[name])
    assert all(map(torch.equal, update(parameters, optimizer, 3), update(others, joiner, 3)))


def test_weights_with_a_scale_are_those_of_the_parameters_when_the_state_is_forgotten():
    from ft.state.snapshot import optimizers

    parameters, optimizer = scaled(1)
    update(parameters, optimizer, 0)
    with torch.no_grad():
        parameters[0].copy_(torch.arange(5.0) * 1000)
    optimizers.forget(optimizer)
    kept = optimizer.get_unscaled_state(parameters[0], "master_param")
    assert torch.allclose(kept, parameters[0].float(), rtol=1e-3)
    assert not optimizer.get_unscaled_state(parameters[0], "exp_avg").any()


@pytest.mark.on_ranks(1, init=False)
def test_loss_scaler_and_schedule_come_back():
    from types import SimpleNamespace

    from ft.state.snapshot import optimizers
    from megatron import patches
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    patches.apply()
    scalers = [DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 3, 2) for _ in range(2)]
    for found_inf in (True, True, False, False):
        scalers[0].update(found_inf)
    part = SimpleNamespace(grad_scaler=scalers[1])
    optimizers.set_scaler(part, optimizers.scaler_state(SimpleNamespace(grad_scaler=scalers[0])))
    for found_inf in (False, True, False):
        for scaler in scalers:
            scaler.update(found_inf)
    assert scalers[0].scale.item() == scalers[1].scale.item()
    assert scalers[0].state_dict()["growth_tracker"] == scalers[1].state_dict()["growth_tracker"]

    group = {"params": [], "lr": 0.0, "weight_decay": 0.0}
    inner = SimpleNamespace(param_groups=[group])
    schedule = OptimizerParamScheduler(inner, 0.0, 1.0, 0.1, 2, 20, "cosine", 0.0, 0.1, 20, "linear")
    schedule.step(5)
    saved, rate = optimizers.numbers(schedule.state_dict()), group["lr"]
    schedule.step(7)
    optimizers.set_schedule(schedule, saved)
    assert schedule.num_steps == 5
    schedule.step(0)
    assert group["lr"] == rate


def refusals_of_what_is_not_restored(corpus):
    """Return the problems of one training state after the other, each with another part that no snapshot holds."""
    from types import SimpleNamespace

    from torch.distributed.tensor import distribute_tensor

    from ft.protection.training_state import what_is_not_restored
    from megatron.core import parallel_state

    trainer = plain_loop.PlainTrainer(plain_loop.Setting(corpus, config=NO_DROPOUT, ddp=DISTRIBUTED))
    chunks, optimizer, scheduler = trainer.chunks, trainer.optimizer, trainer.scheduler
    (chunk,), module = chunks, trainer.chunks[0].module
    other = torch.nn.Linear(2, 2)
    group = optimizer.chained_optimizers[0].optimizer.param_groups[0]
    found = {}

    def note(name, *state):
        found[name] = [problem for problem, fix in what_is_not_restored(*state) if fix]

    note("nothing", chunks, optimizer, scheduler)
    chunk.requires_grad_(False)
    note("frozen", chunks, optimizer, scheduler)
    chunk.requires_grad_(True)
    note("another optimizer", chunks, torch.optim.Adam(chunk.parameters()), scheduler)
    note("a wrapped optimizer", chunks, SimpleNamespace(optimizer=torch.optim.Adam(chunk.parameters())), scheduler)
    note("no wrapper", [module], optimizer, scheduler)
    note("no chunks", [], optimizer, scheduler)
    note("no schedule", chunks, optimizer, object())
    note("tensors in the schedule", chunks, optimizer, torch.nn.BatchNorm1d(2))
    kept, group["lr"] = group["lr"], torch.tensor(0.1)
    note("tensors in a group", chunks, optimizer, scheduler)
    group["lr"] = kept
    module.register_parameter("later", other.weight)
    note("a later parameter", chunks, optimizer, scheduler)
    split = distribute_tensor(torch.ones(2), dist.init_device_mesh("cpu", (1,)))
    module.register_parameter("later", torch.nn.Parameter(split, requires_grad=False))
    note("a split parameter", chunks, optimizer, scheduler)
    parallel_state.destroy_model_parallel()
    note("no grid", chunks, optimizer, scheduler)
    return found


def test_what_a_recovery_could_not_restore_is_refused_by_name(ranks, corpus):
    (found,) = ranks(refusals_of_what_is_not_restored, 1, corpus)
    assert found.pop("nothing") == found.pop("frozen") == []
    says = {
        "another optimizer": "the optimizer is a torch.optim.adam.Adam, and not megatron-core's",
        "a wrapped optimizer": "the optimizer is a types.SimpleNamespace, and not megatron-core's",
        "no wrapper": "GPTModel, which lacks what a recovery resets: module, bucket_groups",
        "no chunks": "there are no model chunks",
        "no schedule": "the scheduler is a builtins.object, which has no state_dict",
        "tensors in the schedule": "the state of the scheduler has tensors, which no snapshot holds: weight, bias",
        "tensors in a group": "parameter groups of the optimizer have tensors, which no snapshot holds: lr",
        "a later parameter": "1 parameter(s) of the model chunks belong to no part of the optimizer",
        "a split parameter": "parameters of model chunk 0 are DTensors, which no snapshot holds: module.later",
        "no grid": "megatron.core.parallel_state is not initialised",
    }
    assert found.keys() == says.keys()
    for name, text in says.items():
        assert any(text in problem for problem in found[name]), (name, found[name])


@pytest.mark.on_ranks(1)
def test_a_buffer_that_a_forward_pass_replaces_comes_back(corpus):
    from ft.state.snapshot.capture import Capture

    trainer = plain_loop.PlainTrainer(plain_loop.Setting(corpus, config=NO_DROPOUT))
    (chunk,) = trainer.chunks
    chunk.module.register_buffer("seen", torch.zeros(2))
    chunk.module.register_buffer("cache", torch.ones(2), persistent=False)
    capture = Capture(trainer.chunks, trainer.optimizer, trainer.scheduler, alone=True)
    chunk.module.seen = torch.full((2,), 3.0)
    taken = capture.state({})
    chunk.module.seen = torch.full((2,), 9.0)
    capture.apply(taken)
    assert chunk.module.seen.tolist() == [3.0, 3.0]
    chunk.module.cache = torch.ones(5)  # as YaRN's cosines for longer samples
    capture.apply(taken)
    assert chunk.module.cache.tolist() == [1.0] * 5


def draw() -> list:
    import random

    import numpy

    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tracked = torch.rand(3).tolist()
    gauss = [random.gauss(0, 1), numpy.random.standard_normal()]
    return [random.random(), *gauss, numpy.random.rand(), torch.rand(3).tolist(), tracked]


@pytest.mark.on_ranks(1)
def test_every_generator_comes_back():
    from ft.state.snapshot import rng
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    draw()
    states = rng.blobs()
    first, _ = draw(), draw()
    rng.restore(states)
    assert draw() == first
