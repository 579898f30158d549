"""Describe how a model is laid out on a cluster for ``ft dmr estimate``.

A layout consists of the sizes of the parallel groups, the batch and its microbatches, and the kind of activation
recomputation.
"""

from dataclasses import dataclass

from ft.base.errors import UserError
from ft.lab.estimate.clusters import Cluster
from ft.lab.estimate.models import Model

RECOMPUTE = ("full", "none")


@dataclass(frozen=True)
class Bytes:
    """Bytes of training state per parameter.

    The default is mixed precision as in Megatron: bf16 weights, fp32 gradients, fp32 master weights and both Adam
    moments (Rajbhandari et al. 2019, arXiv 1910.02054: 12 bytes for the optimizer).

    Attributes:
        weight: bytes of the weight.
        gradient: bytes of the gradient.
        optimizer: bytes of the optimizer state; divided by the data-parallel size where ``sharded``.
        sharded: whether data-parallel ranks share the optimizer state.
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
class Layout:
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
        state: bytes of training state per parameter.
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
    state: Bytes = Bytes()

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def microbatches(self) -> int:
        """Return the number of microbatches of one iteration on each stage."""
        return self.batch // (self.micro * self.dp)

    @property
    def parts(self) -> int:
        """Return the number of parts into which the model is cut; a part is one chunk of one stage.

        The chunk ``chunk`` of the stage ``stage`` is the part number ``chunk * pp + stage``.
        """
        return self.pp * self.chunks

    def layers(self, model: Model) -> list[int]:
        """Return the number of layers of each part.

        If the layers cannot be divided evenly, some parts get one more layer, but not the first and the last part.
        Later parts come first, because fewer microbatches are in flight there.
        """
        base, more = divmod(model.layers, self.parts)
        by_room = sorted(range(self.parts), key=lambda part: (part in (0, self.parts - 1), -part))
        return [base + (part in by_room[:more]) for part in range(self.parts)]

    def check(self, model: Model, cluster: Cluster) -> None:
        """Check that the layout is possible.

        Raises:
            UserError: the layout is impossible; the message names the conflicting numbers.
        """
        for name in ("tp", "pp", "ep", "dp", "batch", "micro", "chunks"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}", "give a whole number of at least 1")
        if self.recompute not in RECOMPUTE:
            raise UserError(f"recomputation {self.recompute!r} is unknown", f"one of: {', '.join(RECOMPUTE)}")
        if self.gpus > cluster.gpus:
            raise UserError(
                f"TP {self.tp} x PP {self.pp} x DP {self.dp} take {self.gpus} GPUs, and there are {cluster.gpus}",
                "give more --gpus, or a smaller layout",
            )
        if self.tp > cluster.per_node:
            raise UserError(f"TP {self.tp} does not fit into a node of {cluster.per_node} GPUs", "give a smaller --tp")
        self._check_shape(model)
        if self.batch % (self.micro * self.dp):
            raise UserError(
                f"a batch of {self.batch} does not divide into microbatches of {self.micro} on {self.dp} copies",
                f"give a multiple of {self.micro * self.dp}",
            )

    def _check_shape(self, model: Model) -> None:
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


def fitted(model: Model, cluster: Cluster, pp: int, tp: int | None = None, ep: int | None = None, **others) -> Layout:
    """Return a layout with ``pp`` stages.

    By default, a tensor-parallel group fills a node, and data parallelism uses all nodes. GPUs that do not suffice for
    another whole copy of the model stay unused.

    Args:
        model: the model.
        cluster: the GPUs.
        pp: number of pipeline stages.
        tp: tensor-parallel size; None: the largest that fits.
        ep: expert-parallel size; None: the tensor-parallel size, if it divides the number of experts, else 1.

    Raises:
        UserError: the layout is impossible.
    """
    if tp is None:
        most = max(1, cluster.gpus // max(pp, 1))
        tp = max(n for n in range(1, min(cluster.per_node, most) + 1) if model.kv_heads % n == model.ffn % n == 0)
    if ep is None:
        ep = tp if model.experts and model.experts.count % tp == 0 else 1
    dp = others.pop("dp", None) or max(1, cluster.gpus // max(tp * pp, 1))
    layout = Layout(tp=tp, pp=pp, ep=ep, dp=dp, **others)
    layout.check(model, cluster)
    return layout
