"""List the operators and transfers of one transformer layer on one GPU, with their FLOPs and bytes, and estimate their
seconds with a roofline model.

The list is input for the analytic cost estimate (``ft dmr estimate``). A product is a matrix multiplication; a transfer
is a collective of tensor or expert parallelism (TP, EP). Tensor and sequence parallelism follow Korthikanti et al. 2022
(arXiv 2205.05198): activations between the products are split along the sequence, gathered before the first product and
reduce-scattered after the second. The operators are those that a fused implementation launches. Sizes are those of one
microbatch on one tensor-parallel rank, in bf16.

An operator takes its arithmetic time or its memory time, whichever is longer. The rates (FLOP/s, bytes/s) are assumed
shares of the documented peak rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ft.lab.estimate.cluster import ATTENTION, LATENCY_S, LINK, MEMORY, NETWORK, PRODUCTS, GpuCluster, JobSizes, Model

BF16, FP32 = 2, 4
BACKWARD = ".backward"


@dataclass(frozen=True)
class OperatorWork:
    """One operator.

    Attributes:
        kind: "product", "attention" or "elementwise"; it determines the achieved FLOP/s or bytes/s.
        moved: bytes that the operator reads and writes.
        inputs: names of the input tensors, without weights.
        outputs: name of an output tensor -> bytes.
        saved: names of the inputs that its backward needs.
        weight: number of parameters of a product's weight, whose gradient the backward computes.
        mutates: whether the operator changes an input in place, as gradient accumulation does.
    """

    name: str
    kind: str
    flops: float
    moved: float
    inputs: tuple[str, ...]
    outputs: dict[str, int]
    saved: tuple[str, ...] = ()
    weight: int = 0
    mutates: bool = False


@dataclass(frozen=True)
class Transfer:
    """One collective that overlaps with no computation: the GPU computes nothing until the collective ends.

    Attributes:
        kind: "tp" or "ep".
        sent: bytes that each rank sends.
        source: name of the tensor before the collective.
        target: name of the tensor after the collective.
        size: bytes of ``target``.
        back: bytes of the gradient that the corresponding collective in the backward produces.
    """

    name: str
    kind: str
    sent: float
    source: str
    target: str
    size: int
    back: int

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def outputs(self) -> dict[str, int]:
        return {self.target: self.size}


Step = OperatorWork | Transfer


def handed_over(model: Model, layout: JobSizes) -> int:
    """Return the bytes of the activations between two layers on one rank, split along the sequence."""
    return model.sequence * layout.micro * model.hidden * BF16 // layout.tp


class _Builder:
    """Collects the operators and transfers of a layer, and the size of each tensor in bytes. Methods return the name of
    the tensor that they produce."""

    def __init__(self, model: Model, layout: JobSizes):
        self.model, self.layout, self.steps = model, layout, []
        self.tokens = model.sequence * layout.micro
        self.sizes = {"x": handed_over(model, layout)}

    def work(self, name, kind, flops, inputs, output, size, saved=(), weight=0) -> str:
        moved = sum(self.sizes[one] for one in inputs) + size + weight * BF16
        self.steps.append(OperatorWork(name, kind, flops, moved, inputs, {output: size}, saved, weight))
        self.sizes[output] = size
        return output

    def product(self, name: str, rows: float, inner: float, columns: float, source: str, weight=None) -> str:
        """Add the product of a (rows, inner) by an (inner, columns) matrix."""
        weight = int(inner * columns) if weight is None else int(weight)
        size = int(rows * columns * BF16)
        return self.work(name, "product", 2 * rows * inner * columns, (source,), name, size, (source,), weight)

    def elementwise(self, name: str, inputs: tuple[str, ...], size: float, saved=(), output: str = "") -> str:
        return self.work(name, "elementwise", 0.0, inputs, output or name, int(size), saved)

    def transfer(self, name: str, kind: str, sent: float, source: str, target: str, size: float) -> str:
        self.steps.append(Transfer(name, kind, sent, source, target, int(size), self.sizes[source]))
        self.sizes[target] = int(size)
        return target

    def gather(self, source: str) -> str:
        """Add an all-gather along the sequence."""
        tp = self.layout.tp
        full = self.sizes[source] * tp
        return self.transfer(f"gather {source}", "tp", full * (1 - 1 / tp), source, source + "_full", full)

    def scatter(self, source: str, target: str) -> str:
        """Add a reduce-scatter along the sequence."""
        tp, full = self.layout.tp, self.sizes[source]
        return self.transfer(f"scatter {source}", "tp", full * (1 - 1 / tp), source, target, full / tp)

    def attention(self) -> None:
        model, part = self.model, self.sizes["x"]
        width = model.heads * model.head / self.layout.tp
        self.elementwise("norm1", ("x",), part, ("x",))
        columns = (model.heads + 2 * model.kv_heads) * model.head / self.layout.tp
        self.product("qkv", self.tokens, model.hidden, columns, self.gather("norm1"))
        self.elementwise("rope", ("qkv",), self.sizes["qkv"])
        pairs = self.tokens * model.sequence * (0.5 if model.causal else 1.0)
        size = int(self.tokens * width * BF16)
        self.work("attention", "attention", 4 * pairs * width, ("rope",), "context", size, ("rope", "context"))
        self.product("projection", self.tokens, width, model.hidden, "context")
        self.scatter("projection", "attended")
        self.elementwise("add1", ("x", "attended"), part, output="x1")
        self.elementwise("norm2", ("x1",), part, ("x1",))

    def up(self, tokens: float, width: float, source: str, name: str, copies: int = 1) -> None:
        """Add the first product or products of an MLP, and the activation before its last product. ``copies``: number
        of experts on this rank, each with a weight of its own."""
        model = self.model
        weight = copies * model.hidden * width
        wide = 2 if model.gated and self.layout.fused_gate else 1
        between = [self.product(f"{name}_up", tokens, model.hidden, width * wide, source, weight * wide)]
        if model.gated and not self.layout.fused_gate:
            between.append(self.product(f"{name}_gate", tokens, model.hidden, width, source, weight))
        self.elementwise(f"{name}_act", tuple(between), tokens * width * BF16, tuple(between))

    def mlp(self, width: int, name: str) -> str:
        f = width / self.layout.tp
        self.up(self.tokens, f, self.gather("norm2"), name)
        self.product(f"{name}_down", self.tokens, f, self.model.hidden, f"{name}_act")
        return self.scatter(f"{name}_down", name)

    def experts(self) -> list[str]:
        """Add the steps of routed experts on EP ranks; each expert's width is split over TP / EP ranks. The tokens are
        assumed to be spread evenly over the experts."""
        model, layout, experts = self.model, self.layout, self.model.experts
        here, split = self.tokens / layout.tp, layout.tp // layout.ep
        arriving = self.tokens * experts.active / layout.ep
        row = model.hidden * BF16
        self.product("router", here, model.hidden, experts.count, "norm2")
        self.elementwise("permute", ("norm2", "router"), here * experts.active * row, ("router",), "permuted")
        sent = here * experts.active * row * (1 - 1 / layout.ep) + arriving * row * (1 - 1 / split)
        self.transfer("dispatch", "ep", sent, "permuted", "arrived", arriving * row)
        shared = [self.mlp(experts.shared, "shared")] if experts.shared else []
        f, own = model.ffn / split, experts.count // layout.ep
        self.up(arriving, f, "arrived", "expert", own)
        self.product("expert_down", arriving, f, model.hidden, "expert_act", own * model.hidden * f)
        self.transfer("combine", "ep", sent, "expert_down", "combined", here * experts.active * row)
        return [
            self.elementwise("unpermute", ("combined", "router"), here * row, ("combined", "router"), "routed"),
            *shared,
        ]


def forward(model: Model, layout: JobSizes) -> list[Step]:
    """Return the forward of one layer from input "x" to output "y", both split along the sequence."""
    build = _Builder(model, layout)
    build.attention()
    made = [build.mlp(model.ffn, "mlp")] if model.experts is None else build.experts()
    build.elementwise("add2", ("x1", *made), build.sizes["x"], output="y")
    return build.steps


def embedding(model: Model, layout: JobSizes) -> list[Step]:
    """Return the forward of the embedding, before the first layer; its output is "y"."""
    build = _Builder(model, layout)
    build.elementwise("embedding", (), model.sequence * layout.micro * model.hidden * BF16 / layout.tp, output="y")
    return build.steps


def embedding_backward(model: Model, layout: JobSizes) -> list[Step]:
    """Return the operator that adds the gradient of "y" to the rows of the embedding table in fp32."""
    part = model.sequence * layout.micro * model.hidden / layout.tp
    return [
        OperatorWork("embedding.backward", "elementwise", 0.0, part * (BF16 + 2 * FP32), ("d y",), {}, mutates=True)
    ]


def head(model: Model, layout: JobSizes) -> list[Step]:
    """Return the output layer's forward: from "x" to logits, split along the vocabulary, and the loss in fp32."""
    build = _Builder(model, layout)
    build.elementwise("norm", ("x",), build.sizes["x"], ("x",))
    columns = model.vocabulary / layout.tp
    build.product("logits", build.tokens, model.hidden, columns, build.gather("norm"))
    build.elementwise("loss", ("logits",), build.tokens * columns * FP32, ("logits",))
    return build.steps


def backward(steps: Sequence[Step]) -> list[Step]:
    """Return the steps of a layer's backward, given those of its forward.

    The gradient of a tensor is called "d " plus the tensor's name. The backward of a product computes the gradients of
    its input and of its weight, and accumulates the latter in fp32. Transfers are reversed: the backward of an
    all-gather is a reduce-scatter, and vice versa. The second all-gather of sequence parallelism, for the weight
    gradients, overlaps with a product and is left out.
    """
    sizes = _sizes(steps)
    same = {"d " + one: "d " + add for add in ("x1", "y") for one in _added(steps, add)}
    found: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Transfer):
            source = same.get("d " + step.target, "d " + step.target)
            found.append(Transfer(step.name + BACKWARD, step.kind, step.sent, source, "d " + step.source, step.back, 0))
        elif step.kind == "product":
            found += _product_backward(step, sizes)
        elif not step.name.startswith("add"):
            found.append(_other_backward(step, sizes, same))
    return found


def _added(steps: Sequence[Step], output: str) -> tuple[str, ...]:
    """Return the tensors whose sum in the residual stream is ``output``; their gradients equal that of the sum."""
    return next((one.inputs[1:] for one in steps if isinstance(one, OperatorWork) and output in one.outputs), ())


def _sizes(steps: Sequence[Step]) -> dict[str, int]:
    """Return tensor name -> bytes for all tensors; the input of a norm is as large as its output."""
    sizes: dict[str, int] = {}
    for step in steps:
        sizes |= step.outputs
        if isinstance(step, Transfer):
            sizes[step.source] = step.back
        elif step.inputs == ("x",):
            sizes["x"] = step.outputs[step.name]
    return sizes


def _product_backward(step: OperatorWork, sizes: dict[str, int]) -> list[Step]:
    [source], [(output, size)] = step.inputs, step.outputs.items()
    given, gradient = sizes[source], step.weight * BF16
    moved, flops = size + given + gradient, step.flops
    data = OperatorWork(step.name + ".dgrad", "product", flops, moved, ("d " + output,), {"d " + source: given})
    made = {f"dw {step.name}": gradient}
    weight = OperatorWork(step.name + ".wgrad", "product", flops, moved, (source, "d " + output), made)
    moved = gradient + 2 * step.weight * FP32
    add = OperatorWork(step.name + ".accumulate", "elementwise", 0.0, moved, (f"dw {step.name}",), {}, mutates=True)
    return [data, weight, add]


def _other_backward(step: OperatorWork, sizes: dict[str, int], same: dict[str, str]) -> OperatorWork:
    """Return the backward of an operator other than a product.

    The backward of attention executes 2.5 times the FLOPs of its forward, because it recomputes the scores (Dao 2023,
    arXiv 2307.08691). The gradient of a norm's input is added to the gradient of the parallel residual connection.
    """
    gradients = tuple(same.get("d " + output, "d " + output) for output in step.outputs if output != "loss")
    around = {"norm1": ("d x1",), "norm2": ("d y",)}.get(step.name, ())
    inputs = (*step.saved, *gradients, *around)
    # The choice of a token's experts has no gradient; the weights of the experts' outputs have one.
    outputs = {"d " + one: sizes[one] for one in step.inputs if (step.name, one) != ("permute", "router")}
    moved = sum(step.outputs.values()) + sum(outputs.values()) + sum(sizes[one] for one in step.saved)
    moved += sum(sizes[one.removeprefix("d ")] for one in around)
    return OperatorWork(step.name + BACKWARD, step.kind, 2.5 * step.flops, moved, inputs, outputs)


def saved_bytes(steps: Sequence[Step]) -> int:
    """Return the bytes that a layer keeps for its backward without recomputation.

    A gathered tensor counts only with this rank's part, because sequence parallelism gathers it again in the backward.
    """
    sizes = _sizes(steps)
    part = {step.target: step.source for step in steps if isinstance(step, Transfer) and step.kind == "tp"}
    kept = {part.get(one, one) for step in steps if isinstance(step, OperatorWork) for one in step.saved}
    return sum(sizes[one] for one in kept)


def seconds(step: Step, cluster: GpuCluster) -> float:
    """Return the seconds of an operator, or of a collective within a node."""
    if isinstance(step, Transfer):
        return _transfer_seconds(step.sent, cluster.device.link * LINK, cluster)
    share = ATTENTION if step.kind == "attention" else PRODUCTS
    return max(step.flops / (cluster.device.flops * share), read_seconds(step.moved, cluster))


def read_seconds(size: float, cluster: GpuCluster) -> float:
    """Return the seconds of reading (or writing) ``size`` bytes of the device's memory."""
    return size / (cluster.device.memory_rate * MEMORY)


def _transfer_seconds(sent: float, rate: float, cluster: GpuCluster) -> float:
    """Return the seconds of sending ``sent`` bytes at ``rate`` bytes/s; 0 where nothing is sent."""
    return (sent / rate + LATENCY_S) * cluster.slowdown if sent else 0.0


def message_seconds(sent: float, same_node: bool, cluster: GpuCluster) -> float:
    """Return the seconds of a message of ``sent`` bytes between two pipeline stages, on one node or on two."""
    rate = cluster.device.link * LINK if same_node else cluster.network * NETWORK
    return _transfer_seconds(sent, rate, cluster)
