"""Table of the flags that differ from the fields of megatron-core's configuration dataclasses.

A flag normally follows from a field: ``--hidden-size`` from ``hidden_size``, ``--no-rope-fusion`` from a field that is
True by default (see :mod:`megatron.ft_trainer.arguments.core_options`). The rows of the table are the flags that have
another spelling or default than their field, or that have no field but determine one or more fields
(:mod:`megatron.ft_trainer.config`).
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ft.base.errors import UserError

_MOST_LAYERS = 100_000


@dataclass(frozen=True)
class Row:
    """One flag.

    Attributes:
        name: attribute of the options; the name of a field where the row only differs in spelling or default.
        default: its default.
        help: description of the flag; "": the description of the field of that name.
        on: spellings that set the option, to True or to a value.
        off: spellings that set the option to False.
        kind: type of a value; None: the flag takes no value.
        nargs: number of values, as for argparse; None: one.
        choices: the allowed values; empty: all.
        parse: function that converts one word to the value, in place of ``kind``.
    """

    name: str
    default: Any = None
    help: str = ""
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    kind: type | None = None
    nargs: str | None = None
    choices: tuple[Any, ...] = ()
    parse: Callable[[str], Any] | None = None


def pattern(word: str) -> int | list[int]:
    """Parse ``3`` (every third layer) or a 0/1 pattern such as ``[0,1,1]`` or ``([0]*1+[1]*3)*2``."""
    try:
        return int(word)
    except ValueError:
        pass
    if not set(word) <= set("0123456789[](),+* "):
        raise UserError(f"{word!r} is not a pattern of layers", "give N, [0,1,...] or ([0]*a+[1]*b)*c")
    try:
        found = _layers(ast.parse(word.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"the pattern of layers {word!r} cannot be read: {error}", "give N or [0,1,...]") from error
    if not isinstance(found, list) or any(entry not in (0, 1) for entry in found):
        raise UserError(f"{word!r} is not a list of 0 and 1", "give N or [0,1,...]")
    return found


def _layers(node: ast.expr) -> Any:
    """Return the value of a whole number, a list of them, a sum of lists, or a list times a whole number."""
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.List(entries):
            return [_layers(entry) for entry in entries]
        case ast.BinOp(left, ast.Add() | ast.Mult() as operation, right):
            first, second = _layers(left), _layers(right)
            is_sum = isinstance(operation, ast.Add)
            kinds = {type(first), type(second)}
            count = max((value for value in (first, second) if isinstance(value, int)), default=1)
            if kinds == ({list} if is_sum else {list, int}) and count <= _MOST_LAYERS:
                found = first + second if is_sum else first * second
                if len(found) <= _MOST_LAYERS:
                    return found
    raise ValueError(f"it is no list of layers, or has more than {_MOST_LAYERS:,}")


def stages(word: str) -> str:
    """Return a layout of pipeline stages, such as ``Et*2|(tt|)*5L``, without the backslashes of a quoting shell."""
    return word.replace("\\", "")


def _switch(name: str, flag: str, text: str) -> Row:
    return Row(name, False, text, on=(flag,))


def _value(name: str, flag: str, kind: type, default: Any, text: str = "", choices: tuple[Any, ...] = ()) -> Row:
    return Row(name, default, text, on=(flag,), kind=kind, choices=choices)


def _off(name: str, *flags: str) -> Row:
    return Row(name, True, "", off=flags)


_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")

ROWS: tuple[Row, ...] = (
    # the network
    _switch("group_query_attention", "--group-query-attention", "Let query heads share key/value heads."),
    _value("max_position_embeddings", "--max-position-embeddings", int, None, "Longest sequence that positions cover."),
    _value(
        "position_embedding_type",
        "--position-embedding-type",
        str,
        "learned_absolute",
        "How positions enter the model.",
        ("learned_absolute", "rope", "none"),
    ),
    _value("rotary_base", "--rotary-base", int, 10000, "Base of the rotary frequencies."),
    _value("rotary_percent", "--rotary-percent", float, 1.0, "Share of each head that is rotated."),
    _value(
        "rotary_seq_len_interpolation_factor",
        "--rotary-seq-len-interpolation-factor",
        float,
        None,
        "Linear interpolation of rotary positions for longer sequences.",
    ),
    _switch("use_rope_scaling", "--use-rope-scaling", "Scale the rotary frequencies as Llama 3 does."),
    _value("rope_scaling_factor", "--rope-scaling-factor", float, 8.0, "Factor of --use-rope-scaling."),
    _switch("swiglu", "--swiglu", "Gated SiLU in the MLP."),
    _switch("squared_relu", "--squared-relu", "Squared ReLU in the MLP."),
    _switch("quick_geglu", "--quick-geglu", "Gated quick-GELU in the MLP."),
    _switch("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", "Do not share weights."),
    # multi-latent attention
    _value("q_lora_rank", "--q-lora-rank", int, None),
    _value("kv_lora_rank", "--kv-lora-rank", int, 32),
    _value("rotary_scaling_factor", "--rotary-scaling-factor", float, 1.0),
    # experts
    _value("num_experts", "--num-experts", int, None, "Experts in an MoE layer; absent: a dense model."),
    Row("moe_layer_freq", 1, "", on=("--moe-layer-freq",), parse=pattern),
    Row(
        "moe_router_load_balancing_type",
        "aux_loss",
        "",
        on=("--moe-router-load-balancing-type",),
        kind=str,
        nargs="+",
        choices=_BALANCING,
    ),
    Row("moe_aux_loss_coeff", 0.0, "", on=("--moe-aux-loss-coeff",), kind=float, nargs="+"),
    # kernels
    _off("masked_softmax_fusion", "--no-masked-softmax-fusion"),
    Row("bias_gelu_fusion", True, "Fuse bias and GELU.", off=("--no-bias-gelu-fusion",)),
    Row("bias_swiglu_fusion", True, "Fuse bias and SwiGLU.", off=("--no-bias-swiglu-fusion",)),
    _off("bias_dropout_fusion", "--no-bias-dropout-fusion"),
    _off("apply_rope_fusion", "--no-rope-fusion"),
    _off("persist_layer_norm", "--no-persist-layer-norm"),
    _off("gradient_accumulation_fusion", "--no-gradient-accumulation-fusion"),
    Row("attention_softmax_in_fp32", False, "", on=("--attention-softmax-in-fp32",)),
    _value(
        "transformer_impl",
        "--transformer-impl",
        str,
        None,
        "Default: Transformer Engine where it is installed and a GPU is present, else local.",
        ("local", "transformer_engine"),
    ),
    # number formats and recomputation
    _switch(
        "accumulate_allreduce_grads_in_fp32",
        "--accumulate-allreduce-grads-in-fp32",
        "Accumulate and reduce gradients in fp32 (always so with bf16 unless --grad-reduce-in-bf16).",
    ),
    _switch("grad_reduce_in_bf16", "--grad-reduce-in-bf16", "Reduce gradients in bf16."),
    _switch("recompute_activations", "--recompute-activations", "Older spelling of --recompute-granularity selective."),
    # the layout
    Row("pipeline_model_parallel_layout", None, "", ("--pipeline-model-parallel-layout",), parse=stages),
    _value(
        "num_layers_per_virtual_pipeline_stage",
        "--num-layers-per-virtual-pipeline-stage",
        int,
        None,
        "Layers in a model chunk of the interleaved schedule.",
    ),
    _value(
        "num_virtual_stages_per_pipeline_rank",
        "--num-virtual-stages-per-pipeline-rank",
        int,
        None,
        "Model chunks per rank of the interleaved schedule.",
    ),
    _value(
        "decoder_first_pipeline_num_layers", "--decoder-first-pipeline-num-layers", int, None, "On the first stage."
    ),
    _value("decoder_last_pipeline_num_layers", "--decoder-last-pipeline-num-layers", int, None, "On the last stage."),
    _off("overlap_p2p_comm", "--no-overlap-p2p-communication"),
    Row("cp_comm_type", ["p2p"], "", on=("--cp-comm-type",), kind=str, nargs="+"),
    # data parallelism
    Row(
        "align_grad_reduce", True, "Launch gradient reductions on all stages together.", off=("--no-align-grad-reduce",)
    ),
    _off("align_param_gather", "--no-align-param-gather"),
    _value("ddp_bucket_size", "--ddp-bucket-size", int, None, "Parameters in a gradient bucket."),
    _value("ddp_num_buckets", "--ddp-num-buckets", int, None, "Gradient buckets, instead of their size."),
    # the optimizer
    _value(
        "optimizer",
        "--optimizer",
        str,
        "adam",
        "",
        ("adam", "sgd"),
    ),
    _value("min_lr", "--min-lr", float, 0.0),
    # process groups
    _switch(
        "use_tp_pp_dp_mapping", "--use-tp-pp-dp-mapping", "Order ranks TP, CP, EP, PP, DP; not TP, CP, EP, DP, PP."
    ),
    _value("distributed_backend", "--distributed-backend", str, None, "Default: by the device.", ("nccl", "gloo")),
    _value("distributed_timeout_minutes", "--distributed-timeout-minutes", int, 10, "How long a collective may take."),
    Row(
        "create_gloo_process_groups",
        True,
        "Make gloo groups beside the NCCL ones.",
        off=("--disable-gloo-process-groups",),
    ),
)

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
        *("reduce_scatter_with_fp32_accumulation", "muon_momentum", "muon_split_qkv", "pin_cpu_grads"),
        *("pin_cpu_params", "optimizer_offload_fraction", "experimental_attention_variant", "is_hybrid_model"),
    )
)
"""Fields without a flag: they follow from others, keep their defaults, or are spelt otherwise by Megatron-LM."""
