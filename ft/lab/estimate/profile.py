"""Compute from analytic costs the trace of one training iteration that profiling a run would record, operators, windows
(times in which a stage only communicates or is idle) and memory. The planner of DMR accepts it in place of a profile.

A unit is the forward or the backward pass of one microbatch through one part of the model, which is a chunk of a stage.
A segment is the part of a layer that activation checkpointing recomputes in the backward pass.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from ft.lab.estimate import block
from ft.lab.estimate.block import BF16, FP32, OperatorWork, Step, Transfer, message_seconds, read_seconds, seconds
from ft.lab.estimate.cluster import RESERVED, GpuCluster, JobSizes, Model
from ft.systems.dmr.plan.predict import Timeline, idle, simulate
from ft.systems.dmr.plan.trace import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    MemoryInUse,
    Operator,
    Tensor,
    Trace,
    Window,
)
from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit

_MICRO = 1e6
"""Microseconds in a second."""


@dataclass
class Pass:
    """The forward or backward of one part for one microbatch, as if it began at time 0.

    Attributes:
        steps: operators and windows (transfers), one after the other, named as within the microbatch.
        uses: name of a tensor -> (start, duration) of the last step that uses it, in microseconds.
        us: microseconds from the beginning to the end of the last step.
    """

    steps: list[Operator | Window] = field(default_factory=list)
    uses: dict[str, tuple[float, float]] = field(default_factory=dict)
    us: float = 0.0


@dataclass
class PartWork:
    """Work of one part for one microbatch: its forward and its backward (recomputation included), and the bytes of each
    tensor."""

    passes: tuple[Pass, Pass] = field(default_factory=lambda: (Pass(), Pass()))
    sizes: dict[str, float] = field(default_factory=dict)


def part_works(model: Model, layout: JobSizes, cluster: GpuCluster) -> list[PartWork]:
    """Return what a GPU does for one microbatch in each part of the model, in order."""
    return [_part_work(model, layout, cluster, part) for part in range(layout.parts)]


def _part_work(model: Model, layout: JobSizes, cluster: GpuCluster, part: int) -> PartWork:
    layers = layout.layers(model)[part]
    one_layer = block.forward(model, layout)
    back = block.backward(one_layer)
    full = layout.recompute == "full"
    again = _recomputed(one_layer, layout.early_stop)
    last = again[-1] if not layout.early_stop else one_layer[len(again)]
    lay = _StepPlacer(layout, cluster, sum(layout.layers(model)[:part]) + 1)
    between = block.handed_over(model, layout)
    lay.work.sizes |= {"x0": between, f"d{layers}": between}
    if part == 0:
        lay.put(block.embedding(model, layout), -1, FORWARD, "f")
    for layer in range(layers):
        lay.put(one_layer, layer, FORWARD, "f", (*again, last) if full else (), last)
    if part == layout.parts - 1:
        output = block.head(model, layout)
        lay.put(output, layers, FORWARD, "f")
        lay.put(block.backward(output), layers, BACKWARD, "f")
    for layer in reversed(range(layers)):
        if full:
            lay.put(again, layer, RECOMPUTE, "r", again, last)
        lay.put(back, layer, BACKWARD, "r" if full else "f")
    if part == 0:
        lay.put(block.embedding_backward(model, layout), -1, BACKWARD, "f")
    return lay.work


def _recomputed(steps: Sequence[Step], early_stop: bool) -> list[Step]:
    """Return the steps that recomputation executes: all, or with ``early_stop`` those up to the last step that creates
    a tensor the backward needs."""
    if not early_stop:
        return list(steps)
    needed = [i for i, step in enumerate(steps) if isinstance(step, OperatorWork) and step.saved]
    return list(steps[: needed[-1]])


class _StepPlacer:
    """Places the steps of a part one after the other in time and names their tensors.

    A tensor's name contains the layer's number and a letter: "f" for activations of the forward, "r" for activations of
    the recomputation, "g" for gradients. Tensors that are passed between layers are called "x" (activation) or "d"
    (gradient) plus the number of the layer that receives them. Layers are counted from 0 within the part; -1 is the
    embedding, the number of layers is the output layer. ``first`` is the number in the model of the part's first layer.
    """

    def __init__(self, layout: JobSizes, cluster: GpuCluster, first: int):
        self._layout, self._cluster, self._first, self.work = layout, cluster, first, PartWork()

    def put(
        self,
        steps: Iterable[Step],
        layer: int,
        phase: str,
        activations: str,
        segment: Sequence[Step] = (),
        last: Step | None = None,
    ) -> None:
        """Append the steps of a layer. ``activations`` ("f" or "r"): the pass that created the layer's activations."""
        made: dict[str, str] = {}
        members = {id(step) for step in segment}
        onto = self.work.passes[phase != FORWARD]
        for step in steps:
            inputs = tuple(made.get(one) or _name(one, layer, phase, activations) for one in step.inputs)
            for one, size in step.outputs.items():
                name = _name(one, layer, phase, activations)
                # A tensor that several operators read gets a gradient from each; the last gradient stands for the sum.
                while name in made.values():
                    name += "'"
                made[one] = name
                self.work.sizes[name] = size
            outputs = tuple(made[one] for one in step.outputs)
            self._append(onto, step, layer, phase, (inputs, outputs), id(step) in members, step is last)

    def _append(
        self,
        onto: Pass,
        step: Step,
        layer: int,
        phase: str,
        tensors: tuple[tuple[str, ...], tuple[str, ...]],
        inside: bool,
        is_last: bool,
    ) -> None:
        (inputs, outputs), start, t_us = tensors, onto.us, seconds(step, self._cluster) * _MICRO
        number, layer = f"{'f' if phase == FORWARD else 'b'}{len(onto.steps)}", self._first + layer
        onto.us = start + t_us
        onto.uses |= dict.fromkeys((*inputs, *outputs), (start, t_us))
        if isinstance(step, Transfer):
            onto.steps.append(Window(number, start, t_us, step.kind, dynamic=step.kind == "ep"))
            return
        changed = f"gradient of {layer}/{step.name}" if step.mutates else None
        if changed:
            self.work.sizes[changed] = sum(self.work.sizes[one] for one in inputs) * FP32 / BF16
        last = inside and is_last
        onto.steps.append(
            Operator(
                id=number,
                name=step.name,
                phase=phase,
                start_us=start,
                t_us=t_us,
                in_ids=inputs,
                out_ids=outputs,
                layer=layer,
                compare_us=self._compare_us(outputs, changed, inside),
                mutates=(changed,) if changed else (),
                ac_segment=f"l{layer}" if inside else None,
                is_segment_last=last,
                # A row-parallel matrix product at the end of a segment and the reduce-scatter after it count as one
                # operator, as in DTensor.
                comm_tail=last and self._layout.tp > 1 and step.kind == "product",
            )
        )

    def _compare_us(self, outputs: Sequence[str], changed: str | None, inside: bool) -> float:
        """Return the microseconds of comparing the results of two executions.

        For steps that activation checkpointing recomputes anyway, each execution computes a digest of its own outputs.
        For other steps the outputs of both executions are read. Gradient accumulation changes an fp32 buffer that is
        twice as large as the bf16 tensor that is added.
        """
        size = sum(self.work.sizes[one] for one in (*outputs, *([changed] if changed else [])))
        return read_seconds(size * (1 if inside else 2), self._cluster) * _MICRO


def _name(name: str, layer: int, phase: str, activations: str) -> str:
    if name == "x":
        return f"x{layer}"
    if name == "y":
        return f"x{layer + 1}" if phase == FORWARD else f"{activations}{layer}/y"
    if name == "d x":
        return f"d{layer}"
    if name == "d y":
        return f"d{layer + 1}"
    if name.startswith(("d ", "dw ")):
        return f"g{layer}/{name}"
    return f"{activations}{layer}/{name}"


def pipeline_of(model: Model, layout: JobSizes, cluster: GpuCluster) -> Pipeline:
    """Return the pipeline: 1F1B, or interleaved 1F1B if stages have several model chunks, without overlapped messages.

    If all stages fit into one node, messages have the speed of connections inside a node, otherwise that of connections
    between nodes. A message between stages is split over the tensor-parallel ranks.
    """
    sent = model.sequence * layout.micro * model.hidden * BF16 / layout.tp
    same_node = layout.tp * layout.pp <= cluster.per_node
    comm_us = message_seconds(sent, same_node, cluster) * _MICRO if layout.pp > 1 else 0.0
    return Pipeline(layout.pp, layout.microbatches, layout.chunks, comm_us)


def profile(model: Model, layout: JobSizes, cluster: GpuCluster, budget: float | None = None) -> Trace:
    """Return the estimated trace of an iteration. ``budget``: memory that the run may use on each GPU, in bytes; None:
    all memory of the device."""
    works, pipeline = part_works(model, layout, cluster), pipeline_of(model, layout, cluster)

    def part(unit: Unit) -> PartWork:
        return works[unit.chunk * pipeline.stages + unit.stage]

    timeline = simulate(pipeline, lambda unit: part(unit).passes[unit.backward].us)
    builder = _TraceBuilder(layout, cluster)
    for units in timeline.order:
        for unit in units:
            builder.unit(unit, part(unit), timeline.times[unit][0])
    builder.optimizers([stage_parameters(model, layout, stage) for stage in range(layout.pp)], timeline.end_us)
    builder.windows += [
        Window(f"{gap.kind}{i}", gap.start_us, gap.end_us - gap.start_us, gap.kind, gap.stage)
        for i, gap in enumerate(idle(timeline))
    ]
    return Trace(
        fingerprint={
            **{"model": model.name, "tp": layout.tp, "pp": layout.pp, "vpp": layout.chunks, "dp": layout.dp},
            **{"ep": layout.ep, "micro_batch": layout.micro, "microbatches": layout.microbatches},
            **{"torch": "estimate", "core": "estimate", "device": cluster.device.name},
        },
        ops=tuple(sorted(builder.ops, key=lambda op: (op.stage, op.start_us))),
        tensors=builder.tensors(),
        windows=tuple(sorted(builder.windows, key=lambda window: (window.stage, window.start_us))),
        memory=MemoryInUse(_memory(model, layout, timeline), budget or cluster.device.memory),
        pipeline=pipeline,
        units=tuple((unit, *times) for unit, times in timeline.times.items()),
        early_stop=layout.early_stop,
    )


class _TraceBuilder:
    """Collects operators, windows and tensors of the trace. A tensor's memory counts as free after its last use; that
    of gradients and of optimizer state is never free."""

    def __init__(self, layout: JobSizes, cluster: GpuCluster):
        self._layout, self._cluster = layout, cluster
        self.ops: list[Operator] = []
        self.windows: list[Window] = []
        self._last_use: dict[str, float] = {}
        self._sizes: dict[str, float] = {}

    def unit(self, unit: Unit, work: PartWork, start_us: float) -> None:
        """Add the operators, tensors and communication windows of one unit, which begins at ``start_us``."""
        stage, microbatch, chunk, backward = unit
        prefix, found = f"s{stage}c{chunk}m{microbatch}/", work.passes[backward]
        for name, (start, took) in found.uses.items():
            self._sizes[prefix + name] = work.sizes[name]
            self._last_use[prefix + name] = start_us + start + took
        for step in found.steps:
            begin = start_us + step.start_us
            if isinstance(step, Window):
                if step.dur_us:
                    self.windows.append(replace(step, id=prefix + step.id, start_us=begin, stage=stage))
                continue
            changed = tuple(f"s{stage}/{name}" for name in step.mutates)
            self._sizes |= {full: work.sizes[name] for full, name in zip(changed, step.mutates, strict=True)}
            self.ops.append(
                replace(
                    step,
                    id=prefix + step.id,
                    start_us=begin,
                    in_ids=(*(prefix + name for name in step.in_ids), *changed),
                    out_ids=tuple(prefix + name for name in step.out_ids),
                    stage=stage,
                    microbatch=microbatch,
                    chunk=chunk,
                    mutates=changed,
                    ac_segment=step.ac_segment and f"m{microbatch}{step.ac_segment}",
                )
            )

    def optimizers(self, parameters: list[float], start_us: float) -> None:
        """Add one optimizer operator on each stage.

        Adam reads the gradient, the weight and both moments in fp32, writes all but the gradient, and writes a bf16
        weight.
        """
        for stage, count in enumerate(parameters):
            state = f"s{stage}/optimizer"
            count /= self._layout.dp if self._layout.state.sharded else 1
            self._sizes[state] = count * self._layout.state.optimizer
            t_us = read_seconds(count * (7 * FP32 + BF16), self._cluster) * _MICRO
            costs = {"compare_us": 2 * read_seconds(self._sizes[state], self._cluster) * _MICRO, "mutates": (state,)}
            ids = (f"s{stage}/step", "adam", OPTIMIZER)
            self.ops.append(Operator(*ids, start_us, t_us, in_ids=(state,), stage=stage, **costs))

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: Tensor(size, self._last_use.get(name)) for name, size in self._sizes.items()}


class StageMemory(NamedTuple):
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


def stage_parameters(model: Model, layout: JobSizes, stage: int) -> float:
    """Return the number of parameters on one GPU of a stage.

    All parameters are divided by TP: experts are spread over EP ranks, and each of them over TP / EP ranks.
    """
    found = sum(layout.layers(model)[stage :: layout.pp]) * model.layer_parameters
    first, last = stage == 0, stage == layout.pp - 1
    ends = int(first) + int(last) if layout.pp > 1 or not model.tied else 1
    return (found + ends * model.embedding_parameters) / layout.tp


def stage_memory(model: Model, layout: JobSizes, stage: int) -> StageMemory:
    """Return the memory of one GPU of a stage."""
    tokens = model.sequence * layout.micro
    steps, state = block.forward(model, layout), layout.state
    saved = block.saved_bytes(steps)
    full = layout.recompute == "full"
    layer = tokens * model.hidden * BF16 / layout.tp if full else saved
    # A layer's backward holds a gathered activation, its gradient, and the gradient of its widest product's weight.
    widest = max(getattr(step, "weight", 0) for step in steps) * BF16
    transient = 2 * tokens * model.hidden * BF16 + widest
    logits = tokens * model.vocabulary / layout.tp * (BF16 + FP32)
    optimizer = state.optimizer / (layout.dp if state.sharded else 1)
    return StageMemory(
        states=stage_parameters(model, layout, stage) * (state.weight + state.gradient + optimizer),
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


def _memory(model: Model, layout: JobSizes, timeline: Timeline) -> Mapping[int, tuple]:
    """Return the (time, bytes) points of each stage: one at the beginning and one at the end of every unit."""
    found = {}
    for stage, units in enumerate(timeline.order):
        memory = stage_memory(model, layout, stage)
        points = [(0.0, memory.states + RESERVED)]
        for unit, running, after in over_units(memory, units):
            start, end = timeline.times[unit]
            points += [(start, running + RESERVED), (end, after + RESERVED)]
        found[stage] = tuple(points)
    return found
