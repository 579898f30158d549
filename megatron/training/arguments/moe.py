"""Flags: mixture of experts."""

from dataclasses import dataclass
from typing import Literal

from ft.base.errors import UserError
from megatron.training.arguments.schema import flag


def _frequency(word: str) -> int | list[int]:
    """Parse ``3`` (every third layer is MoE) or a 0/1 pattern such as ``[0,1,1]`` or ``([0]*1+[1]*3)*2``."""
    try:
        return int(word)
    except ValueError:
        pass
    if not set(word) <= set("0123456789[](),+* "):
        raise UserError(f"--moe-layer-freq {word!r} is not a pattern", "give N, [0,1,...] or ([0]*a+[1]*b)*c")
    try:
        pattern = eval(word, {"__builtins__": {}})  # only digits and list arithmetic pass the check above
    except (SyntaxError, TypeError) as error:
        raise UserError(f"--moe-layer-freq {word!r} cannot be read: {error}", "give N or [0,1,...]") from error
    if not isinstance(pattern, list) or any(x not in (0, 1) for x in pattern):
        raise UserError(f"--moe-layer-freq {word!r} is not a list of 0 and 1", "give N or [0,1,...]")
    return pattern


@dataclass
class MoeOptions:
    """mixture of experts"""

    num_experts: int | None = None
    """Experts in an MoE layer; absent: a dense model."""

    moe_layer_freq: int | None = flag(1, on="--moe-layer-freq", parse=_frequency)
    """Which layers are MoE: N for every N-th, or a pattern such as '([0]*1+[1]*3)*2'."""

    moe_ffn_hidden_size: int | None = None
    """Width of one expert's MLP. Default: --ffn-hidden-size."""

    moe_shared_expert_intermediate_size: int | None = None
    """Total width of the shared experts; absent: none."""

    moe_router_topk: int = 2
    """Experts a token goes to."""

    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] = (
        "aux_loss"
    )
    """How load is balanced over experts."""

    moe_aux_loss_coeff: float = 0.0
    """Weight of the balancing loss (1e-2 is usual)."""

    moe_z_loss_coeff: float | None = None
    """Weight of the router's z-loss."""

    moe_input_jitter_eps: float | None = None
    """Noise on the router's input."""

    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the routing."""

    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Router scores."""

    moe_router_pre_softmax: bool = False
    """Softmax before the top-k."""

    moe_router_num_groups: int | None = None
    """Groups of experts for group-limited routing."""

    moe_router_group_topk: int | None = None
    """Groups a token may go to."""

    moe_router_topk_scaling_factor: float | None = None
    """Scale of the routing weights with --moe-router-pre-softmax."""

    moe_router_enable_expert_bias: bool = False
    """Balance by a per-expert bias, without an auxiliary loss."""

    moe_router_bias_update_rate: float = 1e-3
    """Step of that bias."""

    moe_grouped_gemm: bool = False
    """Run a rank's experts as one grouped GEMM (needs Transformer Engine)."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    """How tokens travel to experts."""

    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert over the even share; tokens beyond it are dropped."""

    moe_pad_expert_input_to_capacity: bool = False
    """Pad every expert's input to its capacity."""

    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens are dropped."""

    moe_permute_fusion: bool = False
    """Fused permutation kernels (need Transformer Engine)."""

    moe_layer_recompute: bool = False
    """Recompute MoE layers in the backward."""

    def __post_init__(self):
        if self.num_experts is None:
            return
        if self.num_experts < 1:
            raise UserError(f"--num-experts is {self.num_experts}", "give at least 1")
        if not 1 <= self.moe_router_topk <= self.num_experts:
            raise UserError(
                f"--moe-router-topk {self.moe_router_topk} of --num-experts {self.num_experts}",
                f"give a top-k between 1 and {self.num_experts}",
            )
