"""Compute from analytic costs the trace of one training iteration that profiling a run would record.

The trace lists the operators of all pipeline stages and the windows: times in which a stage only communicates or is
idle. The planner of DMR accepts the trace in place of a recorded profile.
"""

from collections import defaultdict
from collections.abc import Mapping

from ft.lab.estimate.block import BF16, FP32, Transfer, message_seconds, read_seconds
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.memory import over_units, stage_memory, stage_parameters
from ft.lab.estimate.models import Model
from ft.lab.estimate.stage import MICRO, PartWork, PlacedStep, part_work
from ft.systems.dmr.plan.predict import Timeline, idle, simulate
from ft.systems.dmr.plan.trace import OPTIMIZER, Memory, Operator, Tensor, Trace, Window
from ft.systems.schedule.kinds import Pipeline
from ft.systems.schedule.program import Unit


def pipeline_of(model: Model, layout: Layout, cluster: Cluster) -> Pipeline:
    """Return the pipeline: 1F1B, or interleaved 1F1B if stages have several model chunks, without overlapped messages.

    If all stages fit into one node, messages have the speed of connections inside a node, otherwise that of connections
    between nodes. A message between stages is split over the tensor-parallel ranks.
    """
    sent = model.sequence * layout.micro * model.hidden * BF16 / layout.tp
    same_node = layout.tp * layout.pp <= cluster.per_node
    comm_us = message_seconds(sent, same_node, cluster) * MICRO if layout.pp > 1 else 0.0
    return Pipeline(layout.pp, layout.microbatches, layout.chunks, comm_us)


def part_works(model: Model, layout: Layout, cluster: Cluster) -> list[PartWork]:
    """Return the work for one microbatch in each part of the model, in order. A part is a model chunk of a stage."""
    return [part_work(model, layout, cluster, part) for part in range(layout.parts)]


def schedule(works: list[PartWork], pipeline: Pipeline) -> Timeline:
    """Return the times at which every stage runs its units (forward and backward passes), without verification."""
    times = [(PartWork.duration_us(work.forward), PartWork.duration_us(work.backward)) for work in works]
    return simulate(pipeline, lambda unit: times[unit.chunk * pipeline.stages + unit.stage][unit.backward])


def profile(model: Model, layout: Layout, cluster: Cluster, budget: float | None = None) -> Trace:
    """Return the estimated trace of an iteration.

    Args:
        model: the model.
        layout: sizes of the parallel groups, microbatches and recomputation.
        cluster: the cluster.
        budget: memory that the run may use on each GPU, in bytes; None: all memory of the device.

    Raises:
        UserError: the layout is impossible.
    """
    layout.check(model, cluster)
    works, pipeline = part_works(model, layout, cluster), pipeline_of(model, layout, cluster)
    timeline = schedule(works, pipeline)
    builder = _Builder(layout, cluster)
    for units in timeline.order:
        for unit in units:
            builder.unit(unit, works[unit.chunk * layout.pp + unit.stage], timeline.times[unit][0])
    builder.optimizers([stage_parameters(model, layout, stage) for stage in range(layout.pp)], timeline.end_us)
    gaps = enumerate(idle(timeline))
    builder.windows += [
        Window(f"{gap.kind}{i}", gap.start_us, gap.end_us - gap.start_us, gap.kind, gap.stage) for i, gap in gaps
    ]
    return Trace(
        fingerprint=_fingerprint(model, layout, cluster),
        ops=tuple(sorted(builder.ops, key=lambda op: (op.stage, op.start_us))),
        tensors=builder.tensors(),
        windows=tuple(sorted(builder.windows, key=lambda window: (window.stage, window.start_us))),
        memory=Memory(_memory(model, layout, cluster, timeline), budget or cluster.device.memory),
        pipeline=pipeline,
        early_stop=layout.early_stop,
    )


def _fingerprint(model: Model, layout: Layout, cluster: Cluster) -> dict[str, object]:
    grid = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.chunks, "dp": layout.dp, "ep": layout.ep}
    batch = {"micro_batch": layout.micro, "microbatches": layout.microbatches}
    return {
        "model": model.name,
        **grid,
        **batch,
        "torch": "estimate",
        "core": "estimate",
        "device": cluster.device.name,
    }


class _Builder:
    """Collects operators, windows and tensors of the trace. A tensor's memory counts as free after its last use."""

    def __init__(self, layout: Layout, cluster: Cluster):
        self.layout, self.cluster = layout, cluster
        self.ops: list[Operator] = []
        self.windows: list[Window] = []
        self.last_use: dict[str, float] = defaultdict(float)
        self.sizes: dict[str, float] = {}
        self.kept: set[str] = set()

    def unit(self, unit: Unit, work: PartWork, start_us: float) -> None:
        """Add the operators, tensors and communication windows of one unit, which begins at ``start_us``."""
        prefix = f"s{unit.stage}c{unit.chunk}m{unit.microbatch}/"
        for i, step in enumerate(work.backward if unit.backward else work.forward):
            tensors = [prefix + name for name in (*step.inputs, *step.outputs)]
            begin = start_us + step.start_us
            for name, full in zip((*step.inputs, *step.outputs), tensors, strict=True):
                self.sizes[full] = work.sizes[name]
                self.last_use[full] = max(self.last_use[full], begin + step.t_us)
            count = f"{prefix}{'b' if unit.backward else 'f'}{i}"
            if isinstance(step.step, Transfer):
                if step.t_us:
                    kind = step.step.kind
                    self.windows.append(Window(count, begin, step.t_us, kind, unit.stage, dynamic=kind == "ep"))
                continue
            self.ops.append(self._operator(unit, work.first + step.layer, step, count, tensors, begin))

    def _operator(
        self, unit: Unit, layer: int, step: PlacedStep, name: str, tensors: list[str], begin: float
    ) -> Operator:
        """Return one operator.

        A row-parallel matrix product at the end of an activation-checkpointing segment is followed by a reduce-scatter.
        The two count as one operator, as in DTensor; the operator is then marked as one that ends in communication
        (``comm_tail``).
        """
        inputs, outputs = tensors[: len(step.inputs)], tensors[len(step.inputs) :]
        mutates: tuple[str, ...] = ()
        if step.step.mutates:
            mutates = (f"s{unit.stage}/gradient of {layer}/{step.step.name}",)
            self.sizes[mutates[0]] = sum(self.sizes[one] for one in inputs) * FP32 / BF16
            self.kept.add(mutates[0])
        return Operator(
            id=name,
            name=step.step.name,
            phase=step.phase,
            start_us=begin,
            t_us=step.t_us,
            in_ids=(*inputs, *mutates),
            out_ids=tuple(outputs),
            stage=unit.stage,
            microbatch=unit.microbatch,
            layer=layer,
            chunk=unit.chunk,
            compare_us=step.compare_us,
            mutates=mutates,
            ac_segment=f"m{unit.microbatch}l{layer}" if step.segment else None,
            is_segment_last=step.segment and step.last,
            comm_tail=step.segment and step.last and self.layout.tp > 1 and step.step.kind == "product",
        )

    def optimizers(self, parameters: list[float], start_us: float) -> None:
        """Add one optimizer operator on each stage.

        Adam reads the gradient, the weight and both moments in fp32, writes all but the gradient, and writes a bf16
        weight.
        """
        for stage, count in enumerate(parameters):
            state = f"s{stage}/optimizer"
            count /= self.layout.dp if self.layout.state.sharded else 1
            self.sizes[state] = count * self.layout.state.optimizer
            self.kept.add(state)
            t_us = read_seconds(count * (7 * FP32 + BF16), self.cluster) * MICRO
            costs = {"compare_us": 2 * read_seconds(self.sizes[state], self.cluster) * MICRO, "mutates": (state,)}
            ids = (f"s{stage}/step", "adam", OPTIMIZER)
            self.ops.append(Operator(*ids, start_us, t_us, in_ids=(state,), stage=stage, **costs))

    def tensors(self) -> Mapping[str, Tensor]:
        """Return all tensors by name, with the time of their last use (None for tensors that are kept)."""
        return {
            name: Tensor(name, size, None if name in self.kept else self.last_use[name])
            for name, size in self.sizes.items()
        }


def _memory(model: Model, layout: Layout, cluster: Cluster, timeline: Timeline) -> Mapping[int, tuple]:
    """Return the (time, bytes) points of each stage: one at the beginning and one at the end of every unit."""
    found = {}
    for stage, units in enumerate(timeline.order):
        memory = stage_memory(model, layout, stage)
        points = [(0.0, memory.states + cluster.reserved)]
        for unit, running, after in over_units(memory, units):
            start, end = timeline.times[unit]
            points += [(start, running + cluster.reserved), (end, after + cluster.reserved)]
        found[stage] = tuple(points)
    return found
