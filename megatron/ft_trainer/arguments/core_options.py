"""The flags of megatron-core's configurations: model, experts, precision, layout, data parallelism, optimizer.

They are generated from the dataclasses of the installed megatron-core, so that a new release brings its flags with it.
A field ``some_field`` becomes ``--some-field`` (with a value, or for a bool that is False by default without one) or
``--no-some-field`` and ``--disable-some-field`` (for a bool that is True by default). The metadata of a field can give
its flag another spelling. :class:`SpeltOtherwise` has the flags that Megatron-LM spells in yet another way or gives
another default, and those without a field, which determine one or more fields (:mod:`megatron.ft_trainer.model`).
"""

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ft.base.errors import Problem, UserError
from ft.base.options import Topic, default_of, field_docs, flag, spellings
from megatron.ft_trainer.arguments import core_fields

_OF_CONFIGS = ("TransformerConfig", "MLATransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")
_MOST_LAYERS = 100_000
"""Largest product of the numbers in a pattern of layers, and so more layers than it has."""
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def pattern(word: str) -> int | list[int]:
    """Parse ``3`` (every third layer) or a 0/1 pattern such as ``[0,1,1]`` or ``([0]*1+[1]*3)*2``."""
    if word.isdecimal():
        return int(word[:9])
    factors = [int(number[:9]) or 1 for number in re.findall(r"\d+", word)]
    if set(word) <= set("0123456789[](),+* ") and "**" not in word and math.prod(factors) <= _MOST_LAYERS:
        with contextlib.suppress(SyntaxError, TypeError, RecursionError, MemoryError):
            found = eval(word.strip())  # of sums and products of short lists only
            if isinstance(found, list) and all(entry in (0, 1) for entry in found):
                return found
    raise UserError(f"{word!r} is not a pattern of layers", "give N, [0,1,...] or ([0]*a+[1]*b)*c")


def stages(word: str) -> str:
    """Return a layout of pipeline stages, such as ``Et*2|(tt|)*5L``, without the backslashes of a quoting shell."""
    return word.replace("\\", "")


@dataclass
class SpeltOtherwise(Topic):
    """Flags that do not follow from a field. One without a text has the help of megatron-core's field of its name."""

    # the network
    group_query_attention: bool = False
    """Let query heads share key/value heads."""

    max_position_embeddings: int | None = None
    """Longest sequence that positions cover."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""

    rotary_base: int = 10000
    """Base of the rotary frequencies."""

    rotary_percent: float = 1.0
    """Share of each head that is rotated."""

    rotary_seq_len_interpolation_factor: float | None = None
    """Linear interpolation of rotary positions for longer sequences."""

    use_rope_scaling: bool = False
    """Scale the rotary frequencies as Llama 3 does."""

    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""

    swiglu: bool = False
    """Gated SiLU in the MLP."""

    squared_relu: bool = False
    """Squared ReLU in the MLP."""

    quick_geglu: bool = False
    """Gated quick-GELU in the MLP."""

    untie_embeddings_and_output_weights: bool = False
    """Do not share weights."""

    # experts
    num_experts: int | None = None
    """Experts in an MoE layer; absent: a dense model."""

    moe_layer_freq: int | list[int] = flag(1, parse=pattern)

    moe_router_load_balancing_type: list[Literal[_BALANCING]] = "aux_loss"

    moe_aux_loss_coeff: list[float] = 0.0

    # kernels
    bias_gelu_fusion: bool = True
    """Fuse bias and GELU."""

    bias_swiglu_fusion: bool = True
    """Fuse bias and SwiGLU."""

    apply_rope_fusion: bool = flag(True, off="--no-rope-fusion")

    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = None

    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Default: Transformer Engine where it is installed and a GPU is present, else local."""

    # number formats and recomputation
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32 (always so with bf16 unless --grad-reduce-in-bf16)."""

    grad_reduce_in_bf16: bool = False
    """Reduce gradients in bf16."""

    recompute_activations: bool = False
    """Older spelling of --recompute-granularity selective."""

    # the layout
    pipeline_model_parallel_layout: str | None = flag(None, parse=stages)

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers in a model chunk of the interleaved schedule."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks per rank of the interleaved schedule."""

    decoder_first_pipeline_num_layers: int | None = None
    """On the first stage."""

    decoder_last_pipeline_num_layers: int | None = None
    """On the last stage."""

    overlap_p2p_comm: bool = flag(True, off="--no-overlap-p2p-communication")

    cp_comm_type: list[str] = flag(["p2p"])

    # data parallelism
    align_grad_reduce: bool = True
    """Launch gradient reductions on all stages together."""

    ddp_bucket_size: int | None = None
    """Parameters in a gradient bucket."""

    ddp_num_buckets: int | None = None
    """Gradient buckets, instead of their size."""

    # the optimizer
    optimizer: Literal["adam", "sgd"] = "adam"

    optimizer_offload_fraction: float = 1.0

    pin_cpu_grads: bool = flag(True, off="--no-pin-cpu-grads")

    pin_cpu_params: bool = flag(True, off="--no-pin-cpu-params")

    # process groups
    use_tp_pp_dp_mapping: bool = False
    """Order ranks TP, CP, EP, PP, DP; not TP, CP, EP, DP, PP."""

    distributed_backend: Literal["nccl", "gloo"] | None = None
    """Default: by the device."""

    distributed_timeout_minutes: int = 10
    """How long a collective may take."""

    create_gloo_process_groups: bool = flag(True, off="--disable-gloo-process-groups")
    """Make gloo groups beside the NCCL ones."""

    def contradictions(self) -> Iterator[Problem]:
        return _complete(self)

    def on_one_rank(self) -> "SpeltOtherwise":
        """Return the options of the same model on one rank, with nothing split or sharded."""
        return replace(self, **{f.name: default_of(f) for f in fields(self) if f.name in _OF_THE_LAYOUT})


_OTHER_DEFAULTS = {
    **{"q_lora_rank": None, "kv_lora_rank": 32, "rotary_scaling_factor": 1.0, "min_lr": 0.0},
    **{"initial_loss_scale": 2**32, "attention_softmax_in_fp32": False, "align_param_gather": True},
    **{"masked_softmax_fusion": True, "bias_dropout_fusion": True, "persist_layer_norm": True},
    "gradient_accumulation_fusion": True,
}
"""Field of core -> Megatron-LM's default, where that differs from core's."""

WITHOUT_FLAG = frozenset(
    (
        *("params_dtype", "enable_autocast", "autocast_dtype", "pipeline_dtype"),
        *("virtual_pipeline_model_parallel_size", "num_microbatches_with_partial_activation_checkpoints"),
        *("tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1", "tp_comm_atomic_ag", "tp_comm_atomic_rs"),
        *("variable_seq_lengths", "batch_p2p_comm", "batch_p2p_sync", "deallocate_pipeline_outputs"),
        *("cpu_offloading", "cpu_offloading_activations", "cpu_offloading_weights"),
        *("cpu_offloading_double_buffering", "num_layers_in_first_pipeline_stage"),
        *("num_layers_in_last_pipeline_stage", "softmax_scale", "gated_linear_unit", "bias_activation_fusion"),
        *("activation_func_fp8_input_store", "memory_efficient_layer_norm", "fused_single_qkv_rope"),
        *("fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red", "use_kitchen"),
        *("moe_token_dropping", "num_moe_experts", "moe_router_topk_limited_devices"),
        *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "disable_parameter_transpose_cache"),
        *("inference_sampling_seed", "use_inference_optimized_layers", "heterogeneous_block_specs"),
        *("hetereogenous_dist_checkpoint", "gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
        *("store_param_remainders", "decoupled_weight_decay", "grad_reduce_in_fp32", "check_for_nan_in_grad"),
        *("bucket_size", "num_buckets", "use_custom_fsdp", "preserve_fp32_weights", "fp8_param", "fp4_param"),
        *("fsdp_all_gather_in_start_param_sync", "megatron_fsdp_use_decoupled_grad"),
        *("megatron_fsdp_cuda_graph_mode", "use_layer_wise_distributed_optimizer", "grad_norm_skip_threshold"),
        *("original_max_position_embeddings", "beta_fast", "beta_slow", "soap_shampoo_beta"),
        *("soap_precondition_frequency", "soap_use_kl_shampoo", "adaptive_muon_moment2_method"),
        *("adaptive_muon_beta2", "adaptive_muon_eps"),
        *("use_te_rng_tracker", "nccl_ub", "average_in_collective", "pad_buckets_for_high_nccl_busbw"),
        *("reduce_scatter_with_fp32_accumulation", "muon_momentum", "muon_split_qkv"),
        *("min_offloaded_tensor_size", "experimental_attention_variant", "is_hybrid_model"),
    )
)
"""Fields without a flag: they follow from others, keep their defaults, or are spelt otherwise by Megatron-LM."""


OF_THE_MODEL = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"),
    *("group_query_attention", "num_query_groups", "position_embedding_type", "rotary_base", "rotary_percent"),
    *("rotary_interleaved", "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
    *("apply_residual_connection_post_layernorm", "swiglu", "squared_relu", "quick_geglu", "add_bias_linear"),
    *("add_qkv_bias", "qk_layernorm", "untie_embeddings_and_output_weights", "multi_latent_attention"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mtp_num_layers"),
    *("num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
    "moe_router_topk_scaling_factor",
)
"""Options that a checkpoint's model has to have in common with the run that loads it."""

_OF_THE_LAYOUT = frozenset(
    (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        *("microbatch_group_size_per_vp_stage", "decoder_first_pipeline_num_layers"),
        *("decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split"),
        *("account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout", "cp_comm_type"),
        *("hierarchical_context_parallel_sizes", "overlap_p2p_comm", "use_distributed_optimizer"),
        *("num_distributed_optimizer_instances", "overlap_grad_reduce", "overlap_param_gather"),
        *("overlap_param_gather_with_optimizer_step", "align_grad_reduce", "align_param_gather", "ddp_bucket_size"),
        *("ddp_num_buckets", "average_in_collective", "use_tp_pp_dp_mapping", "distributed_backend"),
        *("distribute_saved_activations", "tp_comm_overlap", "create_gloo_process_groups"),
        *("overlap_moe_expert_parallel_comm", "distributed_timeout_minutes"),
    )
)
"""Options that say how the model is spread over ranks."""


def _complete(o: Any) -> Iterator[Problem]:
    """Fill in the values that follow from other flags, and yield the contradictions between values."""
    if o.recompute_activations:
        o.recompute_granularity = "selective"
    if o.num_experts == 0:
        o.num_experts = None
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(o, name)
        if isinstance(value, list) and len(value) == 1:
            setattr(o, name, value[0])
    if o.bf16 and not o.grad_reduce_in_bf16:
        o.accumulate_allreduce_grads_in_fp32 = True
    yield from _impossible_numbers(o)
    yield from _contradictions(o)
    yield from _wants(o)
    if o.ffn_hidden_size is None and o.hidden_size:
        gated = int(4 * o.hidden_size * 2 / 3 / 64) * 64
        o.ffn_hidden_size = max(gated, 64) if o.swiglu else 4 * o.hidden_size
    if o.kv_channels is None and o.hidden_size and o.num_attention_heads:
        o.kv_channels = o.hidden_size // o.num_attention_heads


_AT_LEAST_ONE = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_experts"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "num_distributed_optimizer_instances", "distributed_timeout_minutes"),
)


def _impossible_numbers(o: Any) -> Iterator[Problem]:
    for name in _AT_LEAST_ONE:
        if (value := getattr(o, name)) is not None and value < 1:
            yield f"--{name.replace('_', '-')} is {value}", "give at least 1"
    for name in ("attention_dropout", "hidden_dropout"):
        if not 0 <= getattr(o, name) < 1:
            yield f"--{name.replace('_', '-')} is {getattr(o, name)}", "a probability in [0, 1) is needed"
    for name in ("weight_decay", "clip_grad", "lr"):
        if (value := getattr(o, name)) is not None and value < 0:
            yield f"--{name.replace('_', '-')} is {value}", "give 0 or more"
    if o.lr is not None and o.min_lr > o.lr:
        yield f"--min-lr {o.min_lr} is above --lr {o.lr}", "lower --min-lr"
    if o.num_experts is not None and not 1 <= o.moe_router_topk <= o.num_experts:
        yield (
            f"--moe-router-topk {o.moe_router_topk} of --num-experts {o.num_experts}",
            f"give a top-k between 1 and {o.num_experts}",
        )


def _contradictions(o: Any) -> Iterator[Problem]:
    given = [f"--{n.replace('_', '-')}" for n in ("swiglu", "squared_relu", "quick_geglu") if getattr(o, n)]
    if len(given) > 1:
        yield f"{' and '.join(given)} are all activations", "give one of them"
    if o.fp16 and o.bf16:
        yield "--fp16 and --bf16 were both given", "give one of them"
    if o.ddp_bucket_size and o.ddp_num_buckets:
        yield "--ddp-bucket-size and --ddp-num-buckets say the same thing", "give one of them"
    if o.deterministic_mode and o.cross_entropy_loss_fusion:
        yield "--deterministic-mode and --cross-entropy-loss-fusion exclude each other", "drop one of them"
    splits = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    given = [f"--{n.replace('_', '-')}" for n in (*splits, "pipeline_model_parallel_layout") if getattr(o, n)]
    if len(given) > 1:
        yield f"{' and '.join(given)} say the same thing", "give one of them"
    if o.multi_latent_attention and o.group_query_attention:
        yield "--multi-latent-attention and --group-query-attention exclude each other", "drop one of them"
    if o.recompute_granularity != "full" and o.recompute_method:
        problem = f"--recompute-method {o.recompute_method} has no meaning without full recomputation"
        yield problem, "add --recompute-granularity full"
    if o.recompute_modules and o.recompute_granularity != "selective":
        yield (
            "--recompute-modules has no meaning without selective recomputation",
            "add --recompute-granularity selective",
        )


def _wants(o: Any) -> Iterator[Problem]:
    """Yield a problem for each given flag that requires another flag which is not given."""
    if o.recompute_granularity == "full" and not (o.recompute_method and o.recompute_num_layers):
        yield (
            "--recompute-granularity full needs to know which layers",
            "add --recompute-method uniform --recompute-num-layers 1",
        )
    shards = o.use_distributed_optimizer and o.overlap_grad_reduce
    if o.overlap_param_gather and not (shards or o.use_megatron_fsdp):
        yield (
            "--overlap-param-gather needs sharded parameters and overlapped reductions",
            "add --use-distributed-optimizer --overlap-grad-reduce",
        )
    if o.num_distributed_optimizer_instances > 1 and not (o.use_distributed_optimizer or o.use_megatron_fsdp):
        yield (
            f"--num-distributed-optimizer-instances {o.num_distributed_optimizer_instances} needs sharded "
            "optimizer state",
            "add --use-distributed-optimizer",
        )


def _with_the_fields(base: type) -> type:
    """Return ``base``, a dataclass of options, with one more field for each field of core that has a flag."""
    core, found, docs = core_fields.installed_core(), {}, {}
    for config in (core_fields.config_class(core, name) for name in _OF_CONFIGS):
        found |= {f.name: f for f in fields(config) if f.init and f.name not in found}
        docs |= {name: text for name, text in config.HELP.items() if name not in docs}
    own, docs = {f.name for f in fields(base)}, docs | field_docs(base)
    taken = {spelling for f in fields(base) for group in spellings(f) for spelling in group}
    added = []
    for name, each in found.items():
        kind = core_fields.kind_of(each.type)
        if name in own or name in WITHOUT_FLAG or name.startswith("_") or kind is None:
            continue
        option = _option(each, is_switch=kind is bool)
        words = {*option.metadata["on"], *option.metadata["off"]}
        if not taken & words:
            added.append((name, kind, option))
            taken |= words
    made = make_dataclass("CoreOptions", added, bases=(base,))
    made.__module__ = __name__
    made.__doc__ = "megatron-core: model, experts, precision, layout, data parallelism, optimizer"
    made.HELP = {f.name: docs.get(f.name, "") for f in fields(made)}
    return made


def _option(each: Field, *, is_switch: bool) -> Any:
    """Return the dataclass field of the option that follows from a field of core."""
    spelling = each.metadata.get("argparse_meta", {})
    dashed, spelt = each.name.replace("_", "-"), list(spelling.get("arg_names", ()))
    default = _OTHER_DEFAULTS.get(each.name, spelling.get("default", core_fields.default_of(each)))
    if is_switch and default is True:
        other = [] if each.name in _OTHER_DEFAULTS else [f"--disable-{dashed}"]
        return flag(True, off=spelt or [f"--no-{dashed}", *other])
    return flag(default, on=spelt or [f"--{dashed}"], choices=spelling.get("choices"))


if TYPE_CHECKING:
    CoreOptions = Any
else:
    CoreOptions = _with_the_fields(SpeltOtherwise)
"""The dataclass of all these options; those that are not given have Megatron-LM's defaults."""
