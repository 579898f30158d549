"""The flags of megatron-core's configurations: model, experts, precision, layout, data parallelism, optimizer.

They are generated from the dataclasses of the installed megatron-core, so that a new release brings its flags with it.
A field ``some_field`` becomes ``--some-field`` (with a value, or for a bool that is False by default without one) or
``--no-some-field`` and ``--disable-some-field`` (for a bool that is True by default). The metadata of a field can give
its flag another spelling, and so can the table in :mod:`megatron.ft_trainer.arguments.core_table`.
"""

import argparse
import copy
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

from ft.base.errors import Problem, UserError
from megatron.ft_trainer.arguments import core_table
from megatron.ft_trainer.arguments.core_fields import UNKNOWN, CoreField, fields_of, installed_core
from megatron.ft_trainer.arguments.core_table import Row

_OF_CONFIGS = ("TransformerConfig", "MLATransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")


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


class CoreOptions(SimpleNamespace):
    """Values of all flags of megatron-core's configurations; flags that are not given have Megatron-LM's defaults.

    Attributes have the names of the fields where there is a field, else those of the table's rows.

    Raises:
        UserError: a value is impossible, or two values contradict each other.
    """

    def __init__(self, **given: Any):
        super().__init__(**{row.name: copy.copy(row.default) for row in rows()} | given)
        problems = list(_complete(self))
        if problems:
            raise UserError.of(problems)

    def on_one_rank(self) -> "CoreOptions":
        """Return the options of the same model on one rank, with nothing split or sharded."""
        apart = {row.name: row.default for row in rows() if row.name in _OF_THE_LAYOUT}
        return CoreOptions(**vars(self) | apart)


@cache
def rows() -> tuple[Row, ...]:
    """Return all flags: those of the table, and those that follow from the fields of the installed megatron-core."""
    fields = _fields()
    found = {row.name: row for row in core_table.ROWS}
    for name, row in found.items():
        if not row.help and name in fields:
            found[name] = Row(**{**vars(row), "help": fields[name].help})
    taken = {flag for row in found.values() for flag in (*row.on, *row.off)}
    for name, each in fields.items():
        row = None if name in found or name in core_table.WITHOUT_FLAG else _row(each)
        if row is not None and not taken & {*row.on, *row.off}:
            found[name] = row
            taken |= {*row.on, *row.off}
    return tuple(found.values())


def _fields() -> dict[str, CoreField]:
    core = installed_core()
    found: dict[str, CoreField] = {}
    for config in _OF_CONFIGS:
        found |= {name: each for name, each in fields_of(core, config).items() if name not in found}
    return found


def _row(each: CoreField) -> Row | None:
    """Return the flag that follows from a field; None if no word can be converted to its type."""
    dashed, spelt = each.name.replace("_", "-"), tuple(each.spelling.get("arg_names", ()))
    default = each.spelling.get("default", each.default)
    if each.kind.type is None or each.name.startswith("_"):
        return None
    if each.kind.type is bool:
        if each.default is True:
            return Row(each.name, True, each.help, off=spelt or (f"--no-{dashed}", f"--disable-{dashed}"))
        return Row(each.name, default, each.help, on=spelt or (f"--{dashed}",))
    if default is UNKNOWN and each.kind.enum:
        default = None  # megatron-core's default stands
    return Row(
        each.name,
        None if default is UNKNOWN else default,
        each.help,
        on=spelt or (f"--{dashed}",),
        kind=each.kind.type,
        nargs="+" if each.kind.many else None,
        choices=tuple(each.spelling.get("choices", each.kind.choices)),
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add an argument group with all these flags. The parser sets no attribute for flags that are not given."""
    group = parser.add_argument_group("megatron-core: model, experts, precision, layout, data parallelism, optimizer")
    for row in rows():
        shown = "" if row.default in (None, False, True, "", []) else f" [default: {row.default}]"
        common: dict[str, Any] = {
            "dest": row.name,
            "default": argparse.SUPPRESS,
            "help": (row.help + shown).replace("%", "%%"),
        }
        takes_value = row.kind is not None or row.parse is not None
        if row.off:
            text = "Turns off: " + common["help"]
            group.add_argument(*row.off, action="store_false", **{**common, "help": text})
        if row.on and not takes_value:
            group.add_argument(*row.on, action="store_true", **common)
        elif row.on:
            choices = list(row.choices) or None
            group.add_argument(*row.on, type=row.parse or row.kind, nargs=row.nargs, choices=choices, **common)


def spellings() -> list[str]:
    """Return all these flags."""
    return [flag for row in rows() for flag in (*row.on, *row.off)]


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
