"""Flags: number formats and activation recomputation."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.training.arguments.schema import flag


@dataclass
class PrecisionOptions:
    """mixed precision"""

    fp16: bool = False
    """Train in fp16, with a dynamic loss scale unless --loss-scale is given."""

    bf16: bool = False
    """Train in bf16."""

    loss_scale: float | None = None
    """Constant loss scale for fp16."""

    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""

    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""

    loss_scale_window: float = 1000
    """Steps without overflow after which the scale doubles."""

    hysteresis: int = 2
    """Overflows before the scale halves."""

    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32 (always so with bf16 unless --grad-reduce-in-bf16)."""

    grad_reduce_in_bf16: bool = False
    """Reduce gradients in bf16."""

    attention_softmax_in_fp32: bool = False
    """Run the attention softmax in fp32."""

    fp16_lm_cross_entropy: bool = False
    """Leave the logits in fp16 for the loss."""

    def __post_init__(self):
        if self.fp16 and self.bf16:
            raise UserError("--fp16 and --bf16 were both given", "give one of them")
        if self.bf16 and not self.grad_reduce_in_bf16:
            self.accumulate_allreduce_grads_in_fp32 = True
        if self.fp16_lm_cross_entropy and not self.fp16:
            raise UserError("--fp16-lm-cross-entropy was given without --fp16", "add --fp16 or drop it")


@dataclass
class RecomputeOptions:
    """activation recomputation"""

    recompute_granularity: Literal["full", "selective"] | None = None
    """full: whole layers (see --recompute-method); selective: the parts in --recompute-modules."""

    recompute_activations: bool = False
    """Older spelling of --recompute-granularity selective."""

    recompute_method: Literal["uniform", "block"] | None = None
    """uniform: every --recompute-num-layers layers are one unit; block: the first --recompute-num-layers of a stage."""

    recompute_num_layers: int | None = None
    """See --recompute-method."""

    recompute_modules: list[str] | None = flag(None, on="--recompute-modules")
    """Components to recompute under selective: core_attn, moe_act, layernorm, mlp, moe, shared_experts."""

    distribute_saved_activations: bool = False
    """Spread the saved inputs over the TP ranks."""

    def __post_init__(self):
        if self.recompute_activations:
            self.recompute_granularity = "selective"
        if self.recompute_granularity == "full" and not (self.recompute_method and self.recompute_num_layers):
            raise UserError(
                "--recompute-granularity full needs to know which layers",
                "add --recompute-method uniform --recompute-num-layers 1",
            )
        if self.recompute_method and self.recompute_granularity != "full":
            raise UserError(
                f"--recompute-method {self.recompute_method} has no meaning without full recomputation",
                "add --recompute-granularity full",
            )
        if self.recompute_modules and self.recompute_granularity != "selective":
            raise UserError(
                "--recompute-modules has no meaning without selective recomputation",
                "add --recompute-granularity selective",
            )
