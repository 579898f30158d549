"""Published transformer models, GPUs and networks of ``ft dmr estimate``, and how a model is laid out on them.

Rates are documented peak rates, and assumed shares of them that are achieved.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ft.base.errors import UserError
from ft.show.text import percent

GB = 1e9


@dataclass(frozen=True)
class Experts:
    """A mixture of experts that replaces every MLP: experts of a layer, experts that a token is routed to, and the
    width of the expert that every token visits, 0 for none. Routed experts have the width ``Model.ffn``."""

    count: int
    active: int
    shared: int


@dataclass(frozen=True)
class Model:
    """A decoder with RMS norms, grouped-query attention, and an embedding separate from the output layer unless
    ``tied``.

    Attributes:
        head: size of a head.
        ffn: width of the MLP, or of one expert.
        sequence: tokens of a training sequence.
        experts: the mixture of experts, or None.
        gated: whether the MLP has a third matrix (SwiGLU).
        causal: whether FLOPs of attention are counted for the lower triangle of the scores only; older publications
            count the full matrix.
        tied: whether the output layer uses the embedding's weight.
        source: where the shape is published.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocabulary: int
    sequence: int
    experts: Experts | None = None
    gated: bool = True
    causal: bool = True
    tied: bool = False
    source: str = ""

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        if self.experts is None:
            return attention + self._mlp(self.ffn) + 2 * self.hidden
        routed = self.experts.count * (self._mlp(self.ffn) + self.hidden)
        return attention + self._mlp(self.experts.shared) + routed + 2 * self.hidden

    def _mlp(self, width: int) -> int:
        """Return the number of parameters of an MLP or expert of a width."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_parameters + ends

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that one token uses: all but those of experts not chosen for it."""
        if self.experts is None:
            return self.parameters
        asleep = (self.experts.count - self.experts.active) * self._mlp(self.ffn)
        return self.parameters - self.layers * asleep

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward per token, in matrix products and attention.

        The count is 6 for each parameter except those of the embedding (a table lookup), plus 12 * hidden * sequence
        for the attention of each layer, or half of this if attention is causal: Narayanan et al. 2021 (arXiv
        2104.04473), appendix.
        """
        norms = self.layers * 2 * self.hidden + self.hidden
        output = self.embedding_parameters
        matrices = self.active_parameters - norms - output * (1 if self.tied else 2)
        attention = self.layers * 2 * self.heads * self.head * self.sequence * (0.5 if self.causal else 1.0)
        return 6 * (matrices + attention) + 6 * output


_LLAMA3 = "Llama 3 Herd of Models (arXiv 2407.21783), table 3"
_MISTRAL = "config.json of Mistral-Large-Instruct-2407"
_SCOUT = "config.json of Llama-4-Scout-17B-16E (text model; the 0.9 billion of the vision encoder are left out)"
_GPT3 = "Language Models are Few-Shot Learners (arXiv 2005.14165), table 2.1, without positions and biases"
_GPT3_SHAPE = {"gated": False, "causal": False, "tied": True}
_ALL = (
    # name, layers, hidden size, heads, key-value heads, size of a head, width, vocabulary, tokens of a sequence
    Model("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 8192, source=_LLAMA3),
    Model("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 8192, source=_LLAMA3),
    Model("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256, 8192, source=_LLAMA3),
    Model("mistral-large-123b", 88, 12288, 96, 8, 128, 28672, 32768, 8192, source=_MISTRAL),
    Model("llama4-scout", 48, 5120, 40, 8, 128, 8192, 202048, 8192, Experts(16, active=1, shared=8192), source=_SCOUT),
    Model("gpt3-175b", 96, 12288, 96, 96, 128, 49152, 51200, 2048, **_GPT3_SHAPE, source=_GPT3),
)
MODELS = {model.name: model for model in _ALL}


class GpuModel(NamedTuple):
    """One GPU as described by its data sheet.

    Attributes:
        flops: dense bf16 FLOP/s of matrix products (data sheets print twice that, for sparse matrices).
        memory: bytes.
        memory_rate: bytes/s.
        link: bytes/s to the other GPUs of its node, one way (half of what data sheets print).
        network: bytes/s between nodes for each GPU, one way, in NVIDIA's own systems: InfiniBand NDR 400 Gb/s (DGX
            H100, H200) and HDR 200 Gb/s (A100).
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    link: float
    network: float
    source: str


_DEVICES = (
    GpuModel("h200", 989e12, 141 * GB, 4.8e12, 450 * GB, 50 * GB, "NVIDIA H200 data sheet (SXM)"),
    GpuModel("h100", 989e12, 80 * GB, 3.35e12, 450 * GB, 50 * GB, "NVIDIA H100 data sheet (SXM)"),
    GpuModel("h100-nvl", 835e12, 94 * GB, 3.9e12, 300 * GB, 50 * GB, "NVIDIA H100 NVL data sheet"),
    GpuModel("a100", 312e12, 80 * GB, 2.039e12, 300 * GB, 25 * GB, "NVIDIA A100 data sheet (SXM, 80 GB)"),
    GpuModel("a100-40gb", 312e12, 40 * GB, 1.555e12, 300 * GB, 25 * GB, "NVIDIA A100 data sheet (SXM, 40 GB)"),
)
DEVICES = {device.name: device for device in _DEVICES}

PRODUCTS, ATTENTION, MEMORY, LINK, NETWORK = 0.70, 0.45, 0.80, 0.75, 0.80
"""Achieved shares of the peak rates: of FLOP/s in matrix products and in fused attention, of the memory's rate in
elementwise operators, of the bandwidth within a node and between nodes. They are ASSUMED, not measured: they are usual
in reports of training on these devices."""
LATENCY_S = 20e-6
"""Latency of one collective or message in seconds. ASSUMED."""
RESERVED = 7.5 * GB
"""Bytes of each GPU for its context, communication buffers and fragmentation. ASSUMED."""


@dataclass(frozen=True)
class GpuCluster:
    """Nodes of equal GPUs.

    Attributes:
        gpus: number of GPUs in all.
        network: bytes/s between nodes for each GPU, one way.
        slowdown: factor on the time of every transfer; 1 unless calibrated to a measured share (``command.py``).
    """

    device: GpuModel
    gpus: int
    per_node: int = 8
    network: float = 50 * GB
    slowdown: float = 1.0


class Bytes(NamedTuple):
    """Bytes of training state per parameter; data-parallel ranks share the optimizer state where ``sharded``.

    The default is mixed precision as in Megatron: bf16 weights, fp32 gradients, fp32 master weights and both Adam
    moments (Rajbhandari et al. 2019, arXiv 1910.02054: 12 bytes for the optimizer).
    """

    weight: int = 2
    gradient: int = 4
    optimizer: int = 12
    sharded: bool = True


STATES = {"megatron": Bytes(), "titan": Bytes(weight=4, gradient=4, optimizer=8)}
"""Bytes per parameter by trainer. TorchTitan keeps weights, gradients and both moments in fp32; its bf16 copies exist
only while they are used.
"""


@dataclass(frozen=True)
class JobSizes:
    """Sizes of the parallel groups and of the batch.

    Attributes:
        tp: tensor-parallel size, with sequence parallelism; within a node.
        pp: number of pipeline stages.
        ep: expert-parallel size, within a node; its ranks are taken from the tensor-parallel group.
        dp: number of data-parallel copies of the model.
        batch: number of sequences of an iteration, over all data-parallel copies.
        chunks: number of model chunks of each stage; more than one selects the interleaved 1F1B schedule.
        micro: number of sequences of a microbatch.
        recompute: "full" (every layer is an activation-checkpointing segment) or "none".
        early_stop: whether recomputation of a segment ends as soon as it has produced all tensors that the backward
            needs, as in torch's non-reentrant checkpointing; Megatron recomputes the whole segment.
        fused_gate: whether an MLP's gate and up projections are one matrix product, as in Megatron; TorchTitan has two.
    """

    tp: int
    pp: int
    ep: int = 1
    dp: int = 1
    batch: int = 32
    chunks: int = 1
    micro: int = 1
    recompute: str = "full"
    early_stop: bool = False
    fused_gate: bool = True
    state: Bytes = STATES["megatron"]

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches of one iteration on each stage."""
        return self.batch // (self.micro * self.dp)

    @property
    def parts(self) -> int:
        """Return the number of parts into which the model is cut: chunk c of stage s is part c * pp + s."""
        return self.pp * self.chunks

    def layers(self, model: Model) -> list[int]:
        """Return the number of layers of each part.

        If the layers cannot be divided evenly, some parts get one more layer, but not the first and the last part.
        Later parts come first, because fewer microbatches are in flight there.
        """
        base, more = divmod(model.layers, self.parts)
        by_room = sorted(range(self.parts), key=lambda part: (part in (0, self.parts - 1), -part))
        return [base + (part in by_room[:more]) for part in range(self.parts)]

    def check(self, model: Model, cluster: GpuCluster) -> None:
        """Check that the layout is possible.

        Raises:
            UserError: the layout is impossible; the message names the conflicting numbers.
        """
        if self.gpus > cluster.gpus:
            raise UserError(
                f"TP {self.tp} x PP {self.pp} x DP {self.dp} take {self.gpus} GPUs, and there are {cluster.gpus}",
                "give more --gpus, or a smaller layout",
            )
        if self.tp > cluster.per_node:
            raise UserError(f"TP {self.tp} does not fit into a node of {cluster.per_node} GPUs", "give a smaller --tp")
        if self.parts > model.layers:
            cut = f"{self.pp} stages of {self.chunks} chunks" if self.chunks > 1 else f"{self.pp} stages"
            raise UserError(f"{cut} for {model.layers} layers", "give fewer")
        for what, size in (("heads", model.heads), ("key-value heads", model.kv_heads), ("MLP width", model.ffn)):
            if size % self.tp:
                raise UserError(f"{model.name}: {size} {what} do not divide by TP {self.tp}", "give another --tp")
        count = model.experts.count if model.experts else 1
        if count % self.ep:
            raise UserError(
                f"{model.name} has {count} experts, which EP {self.ep} does not divide", "give another --ep"
            )
        if self.tp % self.ep:
            raise UserError(f"EP {self.ep} is taken from TP {self.tp}, which it does not divide", "give another --ep")
        if self.batch % (self.micro * self.dp):
            raise UserError(
                f"a batch of {self.batch} does not divide into microbatches of {self.micro} on {self.dp} copies",
                f"give a multiple of {self.micro * self.dp}",
            )


def fitted(
    model: Model, cluster: GpuCluster, pp: int, tp: int | None = None, ep: int | None = None, **others
) -> JobSizes:
    """Return a layout with ``pp`` stages.

    By default, a tensor-parallel group fills a node, its ranks share the experts if their number divides, and data
    parallelism uses all nodes. GPUs that do not suffice for another whole copy of the model stay unused.

    Raises:
        UserError: the layout is impossible.
    """
    if tp is None:
        most = max(1, cluster.gpus // pp)
        tp = max(n for n in range(1, min(cluster.per_node, most) + 1) if model.kv_heads % n == model.ffn % n == 0)
    if ep is None:
        ep = tp if model.experts and model.experts.count % tp == 0 else 1
    dp = others.pop("dp", None) or max(1, cluster.gpus // (tp * pp))
    layout = JobSizes(tp=tp, pp=pp, ep=ep, dp=dp, **others)
    layout.check(model, cluster)
    return layout


def assumptions(model: Model, cluster: GpuCluster) -> str:
    """Return text that says which figures of a model on a cluster are documented, and which assumed."""
    device = cluster.device
    lines = [
        f"documented: {model.source}; {device.source}",
        f"assumed: {percent(PRODUCTS)} of the peak in matrix products, {percent(ATTENTION)} in attention, "
        f"{percent(MEMORY)} of the memory's rate,",
        f"  {percent(LINK)} of NVLink's {device.link / 1e9:.0f} GB/s, {percent(NETWORK)} of the network's "
        f"{cluster.network / 1e9:.0f} GB/s, {LATENCY_S * 1e6:.0f} us latency,",
        f"  {RESERVED / 1e9:.1f} GB of each GPU's memory for context and buffers; transfers overlap no work,",
        "  data-parallel ones do entirely",
    ]
    return "\n".join([*lines, *(["  tokens spread evenly over experts"] if model.experts else [])])
