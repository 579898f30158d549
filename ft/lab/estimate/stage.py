"""Compute the work of one part of the model (a pipeline stage, or one of its chunks) for one microbatch.

The work is a sequence of steps (operators and transfers) with their times and the names of their tensors. It is input
for the estimate of DMR's cost: DMR executes each operator twice and compares the results. A unit is the forward or the
backward pass of one microbatch through the part. A segment is the part of a layer that activation checkpointing
recomputes in the backward pass.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ft.lab.estimate import block
from ft.lab.estimate.block import Step, Transfer, Work, read_seconds, seconds
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.layout import Layout
from ft.lab.estimate.models import Model
from ft.systems.dmr.plan.trace import BACKWARD, FORWARD, RECOMPUTE

MICRO = 1e6
"""Microseconds in a second."""


@dataclass(frozen=True)
class PlacedStep:
    """A step of a layer, with its time and tensors.

    Attributes:
        step: the operator or transfer.
        layer: number of the layer within the part, from 0; -1 is the embedding, the number of layers the output layer.
        phase: forward, recomputation or backward.
        start_us: start in microseconds since the beginning of the unit.
        t_us: duration in microseconds.
        inputs: names of the input tensors, unique within a microbatch in a part.
        outputs: names of the output tensors, unique within a microbatch in a part.
        compare_us: microseconds to compare the results of two executions, without the executions; 0 for transfers.
        segment: whether the step belongs to the layer's activation-checkpointing segment.
        last: whether the step is the last one of the segment.
    """

    step: Step
    layer: int
    phase: str
    start_us: float
    t_us: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compare_us: float = 0.0
    segment: bool = False
    last: bool = False


@dataclass
class PartWork:
    """Work of one part for one microbatch.

    Attributes:
        first: number of the part's first layer in the model, from 1; 0 is the embedding.
        forward: steps of the forward.
        backward: steps of the backward, recomputation included.
        sizes: name of a tensor -> bytes.
    """

    first: int = 1
    forward: list[PlacedStep] = field(default_factory=list)
    backward: list[PlacedStep] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def duration_us(steps: Sequence[PlacedStep]) -> float:
        """Return the microseconds from the beginning of the unit to the end of its last step."""
        return steps[-1].start_us + steps[-1].t_us if steps else 0.0


def part_work(model: Model, layout: Layout, cluster: Cluster, part: int) -> PartWork:
    """Return everything that a GPU does for one microbatch in one part of the model."""
    layers = layout.layers(model)[part]
    one_layer = block.forward(model, layout)
    back = block.backward(one_layer)
    full = layout.recompute == "full"
    again = _recomputed(one_layer, layout.early_stop)
    last = again[-1] if not layout.early_stop else one_layer[len(again)]
    lay = _StepPlacer(cluster)
    handed_over = model.sequence * layout.micro * model.hidden * block.BF16 // layout.tp
    lay.work.first = sum(layout.layers(model)[:part]) + 1
    lay.work.sizes |= {"x0": handed_over, f"d{layers}": handed_over}
    if part == 0:
        lay.put(lay.work.forward, block.embedding(model, layout), -1, FORWARD, "f")
    for layer in range(layers):
        segment = (*again, last) if full else ()
        lay.put(lay.work.forward, one_layer, layer, FORWARD, "f", segment, last)
    if part == layout.parts - 1:
        output = block.head(model, layout)
        lay.put(lay.work.forward, output, layers, FORWARD, "f")
        lay.put(lay.work.backward, block.backward(output), layers, BACKWARD, "f")
    for layer in reversed(range(layers)):
        if full:
            lay.put(lay.work.backward, again, layer, RECOMPUTE, "r", again, last)
        lay.put(lay.work.backward, back, layer, BACKWARD, "r" if full else "f")
    if part == 0:
        lay.put(lay.work.backward, block.embedding_backward(model, layout), -1, BACKWARD, "f")
    return lay.work


def _recomputed(steps: Sequence[Step], early_stop: bool) -> list[Step]:
    """Return the steps that recomputation executes.

    These are all steps or, with ``early_stop``, those up to the last step that creates a tensor the backward needs.
    """
    if not early_stop:
        return list(steps)
    needed = [i for i, step in enumerate(steps) if isinstance(step, Work) and step.saved]
    return list(steps[: needed[-1]])


class _StepPlacer:
    """Places the steps of a part one after the other in time and names their tensors.

    A tensor's unique name contains the layer's number and a letter: "f" for activations of the forward, "r" for
    activations of the recomputation, "g" for gradients. Tensors that are passed between layers are called "x"
    (activation) or "d" (gradient) plus the number of the layer that receives them.
    """

    def __init__(self, cluster: Cluster):
        self.cluster, self.work, self.times = cluster, PartWork(), {}

    def put(
        self,
        onto: list[PlacedStep],
        steps: Iterable[Step],
        layer: int,
        phase: str,
        activations: str,
        segment: Sequence[Step] = (),
        last: Step | None = None,
    ) -> None:
        """Append the steps of a layer. ``activations`` ("f" or "r"): the pass that created the layer's activations."""
        made: dict[str, str] = {}
        members = {id(step) for step in segment if isinstance(step, Work)}
        for step in steps:
            if isinstance(step, Transfer):
                given, found = (step.source,), {step.target: step.size}
            else:
                given, found = step.inputs, step.outputs
            inputs = tuple(made.get(one) or self._name(one, layer, phase, activations) for one in given)
            for one, size in found.items():
                name = self._name(one, layer, phase, activations)
                # A tensor that several operators read gets a gradient from each; the last gradient stands for the sum.
                while name in made.values():
                    name += "'"
                made[one] = name
                self.work.sizes[name] = size
            outputs = tuple(made[one] for one in found)
            inside = id(step) in members
            onto.append(
                PlacedStep(
                    step=step,
                    layer=layer,
                    phase=phase,
                    start_us=PartWork.duration_us(onto),
                    t_us=self._time(step),
                    inputs=inputs,
                    outputs=outputs,
                    compare_us=self._compare_us(step, inputs, outputs, inside),
                    segment=inside,
                    last=inside and step is last,
                )
            )

    def _name(self, name: str, layer: int, phase: str, activations: str) -> str:
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

    def _compare_us(self, step: Step, inputs: Sequence[str], outputs: Sequence[str], segment: bool) -> float:
        """Return the microseconds of comparing the results of two executions.

        For steps that activation checkpointing recomputes anyway, each execution computes a digest of its own outputs.
        For other steps the outputs of both executions are read. Gradient accumulation changes an fp32 buffer that is
        twice as large as the bf16 tensor that is added.
        """
        if isinstance(step, Transfer):
            return 0.0
        size = sum(self.work.sizes[one] for one in outputs)
        if step.mutates:
            size += self.work.sizes[inputs[0]] * block.FP32 / block.BF16
        return read_seconds(size * (1 if segment else 2), self.cluster) * MICRO

    def _time(self, step: Step) -> float:
        if id(step) not in self.times:
            self.times[id(step)] = (seconds(step, self.cluster) * MICRO, step)
        return self.times[id(step)][0]
