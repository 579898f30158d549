"""Messages of pipelines over NCCL: what core and CheckFree+ send in one batch is one launch, and cannot deadlock."""

# ruff: noqa: E402 - megatron-core is imported after the patches

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fake_nccl import Messenger, Wires
from waiting import at_once

from megatron import patches

patches.apply()

from ft.base.errors import EpochClosed, RecoverableError
from ft.state.groups import group as groups
from ft.state.groups.group import Group
from ft.state.groups.registry import together
from ft.state.groups.state import EpochState
from ft.systems.checkfree.plus import Iteration
from ft.systems.schedule.kinds import _passes, half_swapped
from ft.systems.schedule.program import beside_units
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

STAGES, MICROBATCHES, HIDDEN = 4, 8, 2


class Stage(torch.nn.Module):
    """One stage, or one chunk of a stage: it multiplies by a weight."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config):
        super().__init__()
        self.config, self.given = config, None
        self.weight = torch.nn.Parameter(torch.full((1,), 1.5))

    def set_input_tensor(self, tensors) -> None:
        self.given = tensors[0]

    def forward(self, data):
        return (data if self.given is None else self.given) * self.weight


def step(data, model):
    return model(next(data)), lambda output: (output.sum(), {"loss": output.detach().sum()})


def data(chunks: int = 1) -> list:
    return [iter([torch.full((1, 1, HIDDEN), 1.0 + number) for number in range(MICROBATCHES)]) for _ in range(chunks)]


def made(name: str, ranks: list[int], rank: int, backend) -> Group:
    group = Group(name, "", ranks, rank, EpochState(0, False, lambda name, error: None), None)
    group.connectors = {"cuda": None, "cpu": None}
    group.attach(SimpleNamespace(device_type="cuda", backend=backend, drop=lambda: None))
    dist.distributed_c10d._world.pg_group_ranks[group] = {one: one for one in ranks}
    return group


def run_core(rank: int, group: Group, chunks: int, batched: bool) -> list[torch.Tensor]:
    config = TransformerConfig(
        num_layers=STAGES * chunks,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        microbatch_group_size_per_vp_stage=STAGES,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=batched,
        overlap_p2p_comm=not batched,
        batch_p2p_sync=False,
    )
    alone = Group("alone", "", [0], 0, group.state, None)
    collection = ProcessGroupCollection()
    collection.pp, collection.embd, collection.pos_embd = group, None, None
    collection.tp = collection.cp = collection.dp_cp = alone
    model = [Stage(config) for _ in range(chunks)]
    for number, chunk in enumerate(model):
        chunk.vp_stage = number if chunks > 1 else None
    run = schedules.forward_backward_pipelining_with_interleaving
    if chunks == 1:
        run = schedules.forward_backward_pipelining_without_interleaving
    run(
        forward_step_func=step,
        data_iterator=data(chunks),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=P2PCommunicator(group, config),
        pg_collection=collection,
    )
    return [chunk.weight.grad for chunk in model]


class Multiplies(Iteration):
    """An iteration of CheckFree+ on a stage that only multiplies by a weight; the messages are production's."""

    def __init__(self, program, group, rank):
        self._program, self._groups, self._stage = program, SimpleNamespace(pp=group), rank
        self._config = SimpleNamespace(deallocate_pipeline_outputs=False)
        self._arrived, self._made, self._open, self._awaited = {}, {}, {}, set()
        self._requests, self._in_flight, self._outputs = [], [], []
        self.weight = torch.full((1,), 1.5, requires_grad=True)

    def _forward(self, unit, given):
        given = torch.full((1, 1, HIDDEN), 1.0 + unit.microbatch) if given is None else given
        return given * self.weight

    def _backward(self, unit, taken, output, gradient):
        output.backward(torch.full_like(output, 1 / MICROBATCHES) if gradient is None else gradient)
        return None if taken is None else taken.grad

    def _empty(self):
        return torch.empty(1, 1, HIDDEN, requires_grad=True)


def core_1f1b(rank: int, group: Group) -> list[torch.Tensor]:
    return run_core(rank, group, 1, True)


def core_interleaved(rank: int, group: Group) -> list[torch.Tensor]:
    return run_core(rank, group, 2, True)


def core_overlapping(rank: int, group: Group) -> list[torch.Tensor]:
    return run_core(rank, group, 2, False)


def plus_swapped(rank: int, group: Group) -> list[torch.Tensor]:
    """CheckFree+'s normal microbatches, and then the swapped ones, with a message beside each unit."""
    order = [[*normal, *swapped] for normal, swapped in zip(*_passes(STAGES, MICROBATCHES), strict=True)]
    iteration = Multiplies(beside_units(half_swapped(STAGES, MICROBATCHES), order), group, rank)
    iteration._execute_all()
    return [iteration.weight.grad]


def one_by_one(messages: list[dist.P2POp]) -> list[dist.Work]:
    how = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [one.op(one.tensor, group=one.group, **{how[one.op]: one.group_peer}) for one in messages]


def run_all(
    monkeypatch, program, joined: bool, eager: bool = True
) -> tuple[Wires, dict[int, list[torch.Tensor]], dict[int, Exception]]:
    """Run ``program`` on all stages, each a thread, and return the gradients and errors of its stages.

    ``joined``: whether torch's ``batch_isend_irecv`` is wrapped; otherwise it does what it did before torch 2.14.
    """
    monkeypatch.setattr(groups, "wrap", lambda connections, rank, size: connections[0].backend)
    monkeypatch.setattr(groups, "_device_type", lambda values: "cuda")
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    batched = together(dist.batch_isend_irecv) if joined else one_by_one
    monkeypatch.setattr(dist, "batch_isend_irecv", batched)
    wires, gradients, errors = Wires(STAGES, eager), {}, {}

    def stage(rank: int) -> None:
        try:
            gradients[rank] = program(rank, made("pp", list(range(STAGES)), rank, Messenger(wires, rank)))
        except RecoverableError as error:
            errors[rank] = error
        finally:
            wires.ends()

    at_once(stage, range(STAGES))
    return wires, gradients, errors


def expected(program) -> torch.Tensor:
    """Return the gradient of the weights, which are all equal, for the mean of the sums of the outputs."""
    weights = STAGES * (1 if program in (core_1f1b, plus_swapped) else 2)
    mean = sum(1.0 + number for number in range(MICROBATCHES)) / MICROBATCHES
    return torch.full((1,), HIDDEN * mean * 1.5 ** (weights - 1))


@pytest.mark.parametrize("program", [core_1f1b, core_interleaved, plus_swapped])
def test_messages_that_are_launched_one_by_one_hang_and_together_they_do_not(monkeypatch, program):
    with monkeypatch.context() as patched:
        wires, _, errors = run_all(patched, program, joined=False, eager=False)
        assert wires.deadlock and errors
    wires, gradients, _ = run_all(monkeypatch, program, joined=True)
    assert not wires.deadlock and wires.largest > 1 and wires.communicators() == {"group"}
    for rank in range(STAGES):
        assert all(torch.allclose(found, expected(program)) for found in gradients[rank])


@pytest.mark.parametrize("eager", [False, True])
def test_messages_that_overlap_keep_cores_order_on_one_stream_and_on_one_for_each_pair(monkeypatch, eager):
    wires, gradients, _ = run_all(monkeypatch, core_overlapping, joined=True, eager=eager)
    assert not wires.deadlock and len(gradients) == STAGES


class Broken(Messenger):
    """A backend whose receives fail; ``ended``: whether the launch was closed."""

    ended = False

    def recv(self, tensors, peer, tag):
        raise RuntimeError("NCCL communicator was aborted")

    def _end_coalescing(self, device):
        self.ended = True


def exchange(monkeypatch, backend) -> tuple[Group, list[dist.Work]]:
    monkeypatch.setattr(groups, "wrap", lambda connections, rank, size: connections[0].backend)
    monkeypatch.setattr(groups, "_device_type", lambda values: "cuda")
    group = made("pp", [0, 1], 0, backend)
    both = [dist.P2POp(call, torch.zeros(1), 1, group) for call in (dist.isend, dist.irecv)]
    return group, together(dist.batch_isend_irecv)(both)


def test_a_batch_that_hangs_is_found_although_its_work_is_dropped_and_its_messages_are_counted(monkeypatch):
    wires = Wires(2, eager=True)
    group, works = exchange(monkeypatch, Messenger(wires, 0))
    assert len(works) == 1 and not group.state.history.entries()[0].work().is_completed()
    del works
    assert group.oldest_unfinished()[0] == "batch_isend_irecv"
    assert group.to_interrupt() and group.report().sent == group.report().received == {1: 1}
    assert [entry.name for entry in group.state.history.entries()] == ["send", "recv"]
    assert group.report().collectives == 0


def test_a_batch_of_a_worker_that_joins_completes_locally():
    group = Group("pp", "", [0, 1], 0, EpochState(0, True, lambda name, error: None), None)
    dist.distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    both = [dist.P2POp(call, torch.zeros(1), 1, group) for call in (dist.isend, dist.irecv)]
    assert [work.wait() for work in together(dist.batch_isend_irecv)(both)] == [True, True]


def test_a_batch_with_a_message_that_fails_is_closed(monkeypatch):
    backend = Broken(Wires(2, eager=True), 0)
    with pytest.raises(RecoverableError):
        exchange(monkeypatch, backend)
    assert backend.ended


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_block_that_an_exception_leaves_is_ended_and_no_abort_begins_before(monkeypatch, is_closed):
    monkeypatch.setattr(groups, "wrap", lambda connections, rank, size: connections[0].backend)
    monkeypatch.setattr(groups, "_device_type", lambda values: "cuda")
    backend = Broken(Wires(2, eager=True), 0)
    group = made("pp", [0, 1], 0, backend)
    group._start_coalescing(torch.device("cuda", 0))
    launching = group.connections()[0].launching
    assert not at_once(lambda _: launching.acquire(blocking=False), [0])[0]
    group.state.closed = (0, "a rank died") if is_closed else None
    with pytest.raises(EpochClosed if is_closed else RecoverableError):
        group.recv([torch.zeros(1)], 1)
    assert backend.ended and at_once(lambda _: launching.acquire(blocking=False), [0])[0]
    group._block = backend, torch.device("cuda", 0), -1  # of a thread that has ended with the lock, as that above
    group.forget_block()
    assert at_once(lambda _: group.connections()[0].launching.acquire(blocking=False), [0])[0]


def test_a_single_message_that_hangs_on_a_device_is_found_although_its_work_is_dropped(monkeypatch):
    monkeypatch.setattr(groups, "wrap", lambda connections, rank, size: connections[0].backend)
    monkeypatch.setattr(groups, "_device_type", lambda values: "cuda")
    group = made("pp", [0, 1], 0, Messenger(Wires(2, eager=True), 0))
    group.recv([torch.zeros(1)], 1)
    assert group.oldest_unfinished()[0] == "recv" and group.to_interrupt()
