"""Estimate the memory of one GPU of a pipeline stage: training state, and activations of the microbatches in flight.

A unit is the forward or backward pass of one microbatch through one model chunk of the stage. TP and EP are the sizes
of tensor and expert parallelism. A segment is the part of the model that activation checkpointing recomputes at once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ft.lab.estimate.block import BF16, FP32, forward, saved_bytes
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.models import Model
from ft.systems.schedule.kinds import Pipeline, orders
from ft.systems.schedule.program import Unit


@dataclass(frozen=True)
class StageMemory:
    """Memory of one GPU in bytes.

    Attributes:
        states: bytes of weights, gradients and optimizer state.
        kept: bytes for each chunk that one microbatch holds from its forward to its backward. With full recomputation
            these are the inputs of the segments (for each layer 2 * sequence length * microbatch size * hidden size /
            TP), otherwise all tensors that the backward needs.
        working: bytes that one layer's forward and backward hold only while they run; with full recomputation these
            include the layer's recomputed activations.
        ends: bytes of the output layer's logits, which the last stage holds while the output layer runs.
    """

    states: float
    kept: tuple[float, ...]
    working: float
    ends: float


def stage_parameters(model: Model, layout: Layout, stage: int) -> float:
    """Return the number of parameters on one GPU of a stage.

    All parameters are divided by TP: experts are spread over EP ranks, and each of them over TP / EP ranks.
    """
    found = sum(layout.layers(model)[stage :: layout.pp]) * model.layer_parameters
    first, last = stage == 0, stage == layout.pp - 1
    ends = int(first) + int(last) if layout.pp > 1 or not model.tied else 1
    return (found + ends * model.embedding_parameters) / layout.tp


def state_bytes(model: Model, layout: Layout, stage: int) -> float:
    """Return the bytes of weights, gradients and optimizer state on one GPU of a stage."""
    each = layout.state
    optimizer = each.optimizer / (layout.dp if each.sharded else 1)
    return stage_parameters(model, layout, stage) * (each.weight + each.gradient + optimizer)


def stage_memory(model: Model, layout: Layout, stage: int) -> StageMemory:
    """Return the memory of one GPU of a stage."""
    tokens = model.sequence * layout.micro
    steps = forward(model, layout)
    saved = saved_bytes(steps)
    full = layout.recompute == "full"
    layer = tokens * model.hidden * BF16 / layout.tp if full else saved
    # A layer's backward holds a gathered activation, its gradient, and the gradient of its widest product's weight.
    widest = max(getattr(step, "weight", 0) for step in steps) * BF16
    transient = 2 * tokens * model.hidden * BF16 + widest
    logits = tokens * model.vocabulary / layout.tp * (BF16 + FP32)
    return StageMemory(
        states=state_bytes(model, layout, stage),
        kept=tuple(layers * layer for layers in layout.layers(model)[stage :: layout.pp]),
        working=transient + (saved if full else 0),
        ends=logits if stage == layout.pp - 1 else 0,
    )


def over_units(memory: StageMemory, order: Iterable[Unit]) -> Iterator[tuple[Unit, float, float]]:
    """Yield (unit, bytes in use while the unit runs, bytes in use after it) for a stage's units in their order.

    Memory that a unit holds only while it runs counts from the unit's beginning to its end.
    """
    held = memory.states
    for unit in order:
        if not unit.backward:
            held += memory.kept[unit.chunk]
        running = held + memory.working + memory.ends
        if unit.backward:
            held -= memory.kept[unit.chunk]
        yield unit, running, held


def peak_bytes(model: Model, layout: Layout, stage: int) -> float:
    """Return the peak memory of a stage in an iteration without DMR, in bytes."""
    pipeline = Pipeline(stages=layout.pp, microbatches=layout.microbatches, chunks=layout.chunks)
    memory = stage_memory(model, layout, stage)
    return max(running for _, running, _ in over_units(memory, orders(pipeline)[stage]))
