"""Compute the size of one rank's snapshot for each pipeline stage, from the flags of the run.

The numbers of parameters are those of the modules of megatron-core's GPT, layer by layer. A snapshot's content is that
of :mod:`ft.state.snapshot.capture`: main parameters (the fp32 copies of the weights) and optimizer state, both sharded
by the distributed optimizer.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft.base.errors import UserError
from ft.lab.plan.snapshot import MAIN, MOMENTS
from megatron.ft_trainer.arguments.layout import Layout, expanded

if TYPE_CHECKING:
    from megatron.ft_trainer.arguments import Options


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters on one rank of a pipeline stage.

    Attributes:
        dense: parameters outside of experts.
        expert: parameters of experts.
    """

    dense: float
    expert: float = 0.0


@dataclass(frozen=True)
class Shard:
    """The size of one rank's snapshot in bytes.

    Attributes:
        owned: the part that is also sent to peers, because not all data-parallel replicas hold it.
        replicated: the part that stays on the rank, because all data-parallel replicas hold it.
    """

    owned: float
    replicated: float


def shards(
    stages: list[Parameters], options: "Options", grid: Layout, per_parameter: float | None = None
) -> list[Shard]:
    """Return the snapshot of one rank of each pipeline stage.

    Args:
        stages: parameters of one rank of each stage.
        options: the trainer's options.
        grid: sizes of the parallel groups.
        per_parameter: bytes of main copy and optimizer state for each parameter; default: those with all in fp32.
    """
    optimizer = options.core
    momentum = optimizer.optimizer != "sgd" or optimizer.sgd_momentum != 0
    size = per_parameter or MAIN + MOMENTS[optimizer.optimizer] * momentum
    found = []
    for stage in stages:
        replicas = grid.dp * grid.cp
        expert_replicas = grid.world_size // (grid.etp * grid.ep * grid.pp)
        if options.core.use_distributed_optimizer:
            instances = options.core.num_distributed_optimizer_instances
            owned = stage.dense / (replicas / instances) + stage.expert / max(1.0, expert_replicas / instances)
            found.append(Shard(size * owned, 0.0))
        elif replicas == 1:
            found.append(Shard(size * (stage.dense + stage.expert), 0.0))
        else:
            spread = stage.expert if grid.ep > 1 else 0.0
            found.append(Shard(size * spread, size * (stage.dense + stage.expert - spread)))
    return found


def even(total: float, expert: float, grid: Layout) -> list[Parameters]:
    """Return the parameters of one rank of each stage if all parameters are spread evenly over the ranks.

    Args:
        total: number of parameters of the model.
        expert: number of these that belong to experts.
        grid: sizes of the parallel groups.
    """
    dense = (total - expert) / (grid.tp * grid.pp)
    return [Parameters(dense, expert / (grid.etp * grid.ep * grid.pp))] * grid.pp


def from_flags(options: "Options", grid: Layout) -> list[Parameters]:
    """Return the parameters of one rank of each stage.

    Raises:
        UserError: a flag that determines the size is missing, or layers cannot be split over the stages.
    """
    _check(options, grid)
    model, tp, hidden = options.core, grid.tp, options.core.hidden_size
    vocabulary = _vocabulary(options, tp)
    per_layer = [_layer(options, grid, is_moe) for is_moe in _moe_layers(options)]
    dense, expert = [0.0] * grid.pp, [0.0] * grid.pp
    for index, stage in enumerate(_stages(options, grid)):
        dense[stage] += per_layer[index].dense
        expert[stage] += per_layer[index].expert
    dense[0] += vocabulary * hidden / tp
    if model.position_embedding_type == "learned_absolute":
        dense[0] += (model.max_position_embeddings or options.data.seq_length) * hidden
    dense[-1] += _norm(options, hidden)
    if model.untie_embeddings_and_output_weights or grid.pp > 1:
        dense[-1] += vocabulary * hidden / tp
    return [Parameters(*both) for both in zip(dense, expert, strict=True)]


def _check(options: "Options", grid: Layout) -> None:
    model = options.core
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not getattr(model, name)]
    if not (options.tokenizer.vocab_size or options.tokenizer.padded_vocab_size):
        missing.append("vocab_size")
    learned = model.position_embedding_type == "learned_absolute"
    if learned and not (model.max_position_embeddings or options.data.seq_length):
        missing.append("seq_length")
    if missing:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UserError(f"the size of the model depends on {names}, which is missing", "add it, or give --params N")
    for what, count, parts, by in (
        ("attention heads", model.num_attention_heads, grid.tp, "TP"),
        ("experts", options.core.num_experts or grid.ep, grid.ep, "EP"),
    ):
        if count % parts:
            raise UserError(f"{count} {what} cannot be split over {by} {parts}", f"use a multiple of {parts}")


def _vocabulary(options: "Options", tp: int) -> int:
    tokenizer = options.tokenizer
    if tokenizer.padded_vocab_size:
        return tokenizer.padded_vocab_size
    multiple = tokenizer.make_vocab_size_divisible_by * tp
    return -(-tokenizer.vocab_size // multiple) * multiple


def _moe_layers(options: "Options") -> list[bool]:
    layers, moe = options.core.num_layers, options.core
    if not moe.num_experts:
        return [False] * layers
    if isinstance(moe.moe_layer_freq, int):
        return [index % moe.moe_layer_freq == 0 for index in range(layers)]
    if len(moe.moe_layer_freq) != layers:
        raise UserError(f"--moe-layer-freq has {len(moe.moe_layer_freq)} entries for {layers} layers", "give as many")
    return [bool(entry) for entry in moe.moe_layer_freq]


def _stages(options: "Options", grid: Layout) -> list[int]:
    """Return the stage of each layer; with the interleaved schedule, each stage gets several ranges of layers."""
    parallel, layers, chunks = options.core, options.core.num_layers, grid.vpp or 1
    if parallel.pipeline_model_parallel_layout:
        given = expanded(parallel.pipeline_model_parallel_layout)
        return [index % grid.pp for index, parts in enumerate(given) for part in parts if part == "t"]
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    before, after = parallel.account_for_embedding_in_pipeline_split, parallel.account_for_loss_in_pipeline_split
    if first is not None or last is not None:
        others = grid.pp - (first is not None) - (last is not None)
        rest = layers - (first or 0) - (last or 0)
        if rest < 0 or (others and rest % (others * chunks)) or (not others and rest):
            raise UserError(f"{layers} layers cannot be split over {grid.pp} stages as asked", "change the split")
        sizes = [rest // others if others else 0] * grid.pp
        sizes[0] = sizes[0] if first is None else first
        sizes[-1] = sizes[-1] if last is None else last
        return [stage for _ in range(chunks) for stage, size in enumerate(sizes) for _ in range(size // chunks)]
    slots = layers + before + after
    if slots % (grid.pp * chunks):
        raise UserError(
            f"{slots} layers cannot be split over {grid.pp} stages x {chunks} chunks", "change --num-layers"
        )
    per_chunk = slots // (grid.pp * chunks)
    order = [stage for _ in range(chunks) for stage in range(grid.pp) for _ in range(per_chunk)]
    return order[before : len(order) - after]


def _layer(options: "Options", grid: Layout, is_moe: bool) -> Parameters:
    """Return the parameters of one transformer layer on one rank."""
    model, tp, hidden = options.core, grid.tp, options.core.hidden_size
    if model.multi_latent_attention:
        return _with_mlp(options, grid, is_moe, _latent_attention(options, tp) + 2 * _norm(options, hidden))
    queries = model.num_attention_heads * model.kv_channels
    groups = model.num_query_groups if model.group_query_attention else model.num_attention_heads
    projected = queries + 2 * groups * model.kv_channels
    bias = model.add_bias_linear
    dense = (hidden * projected + queries * hidden) / tp + 2 * _norm(options, hidden)
    dense += projected / tp * (bias or model.add_qkv_bias) + hidden * bias
    if model.qk_layernorm:
        dense += 2 * _norm(options, model.kv_channels)
    return _with_mlp(options, grid, is_moe, dense)


def _latent_attention(options: "Options", tp: int) -> float:
    """Return the parameters of one multi-latent attention: its low-rank projections are whole on each TP rank."""
    c = options.core
    heads, hidden, rank = c.num_attention_heads, c.hidden_size, c.q_lora_rank
    queries = heads * (c.qk_head_dim + c.qk_pos_emb_head_dim)
    down = hidden * (c.kv_lora_rank + c.qk_pos_emb_head_dim) + (hidden * rank if rank else 0)
    up = (rank or hidden) * queries + c.kv_lora_rank * heads * (c.qk_head_dim + c.v_head_dim)
    return down + (up + heads * c.v_head_dim * hidden) / tp


def _with_mlp(options: "Options", grid: Layout, is_moe: bool, dense: float) -> Parameters:
    """Return the parameters of a layer whose attention and norms have ``dense`` parameters on one rank."""
    model, tp, hidden = options.core, grid.tp, options.core.hidden_size
    if not is_moe:
        return Parameters(dense + _mlp(options, model.ffn_hidden_size, tp))
    moe = options.core
    dense += moe.num_experts * hidden
    if moe.moe_shared_expert_intermediate_size:
        dense += _mlp(options, moe.moe_shared_expert_intermediate_size, tp)
    one = _mlp(options, moe.moe_ffn_hidden_size or model.ffn_hidden_size, grid.etp)
    if grid.ep == 1:
        return Parameters(dense + moe.num_experts * one)  # here experts are sharded like all other parameters
    return Parameters(dense, moe.num_experts / grid.ep * one)


def _mlp(options: "Options", width: int, tp: int) -> float:
    hidden, gates = options.core.hidden_size, 2 if options.core.swiglu or options.core.quick_geglu else 1
    weights = (gates * width * hidden + width * hidden) / tp
    return weights + (gates * width / tp + hidden) * options.core.add_bias_linear


def _norm(options: "Options", width: int) -> int:
    return width * (2 if options.core.normalization == "LayerNorm" else 1)
