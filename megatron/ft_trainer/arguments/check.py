"""Check the command-line flags for combinations that cannot work, before any process group is created.

Each ``_check_*`` is a pure function of the options and the parallel layout that yields (problem, fix) pairs; a problem
names the numbers that do not fit together. Combinations that only megatron-core's own configuration rejects are
reported by ``model.transformer_config``.
"""

from collections.abc import Iterator

from ft.base.errors import Problem, UserError
from ft.protection.table import problems as problems_of_protections
from megatron.ft_trainer.arguments.layout import Layout, expanded, layout
from megatron.ft_trainer.arguments.needs import GPU, TE, is_here, needs, unmet

REQUIRED = {
    "core": ("num_layers", "hidden_size", "num_attention_heads"),
    "data": ("seq_length",),
    "training": ("micro_batch_size",),
}


def check(options, world_size: int, *, has_te: bool, has_gpu: bool | None = None, replicas: int = 0) -> Layout:
    """Check the options, and return the parallel layout of ``world_size`` ranks.

    Args:
        options: ``megatron.ft_trainer.arguments.Options``; defaults that depend on other flags are filled in.
        world_size: number of ranks of the job.
        has_te: whether Transformer Engine can be imported.
        has_gpu: whether there is a GPU; None: the same as ``has_te``.
        replicas: number of replicas of the model in an FT-HSDP run, each of which has its own process groups; 0 in
            other runs.

    Raises:
        UserError: the options cannot work; the message names every problem, each with its fix.
    """
    grid, found = examine(options, world_size, has_te=has_te, has_gpu=has_gpu, replicas=replicas)
    if found:
        raise UserError.of(found)
    return grid


def examine(
    options,
    world_size: int,
    *,
    has_te: bool,
    has_gpu: bool | None = None,
    replicas: int = 0,
    shapes_are_known: bool = True,
    assumes_machine: bool = False,
) -> tuple[Layout | None, list[Problem]]:
    """Check the options as ``check`` does, but return (layout, problems) instead of raising an error.

    If sizes are missing or do not fit ``world_size``, the layout is None, and only the flags that do not depend on it
    are checked.

    Args:
        shapes_are_known: whether ``options`` has the final sizes (of the model, the batch, ...); if not, sizes are not
            checked.
        assumes_machine: whether to assume that the machine has everything that the options require.
    """
    found = list(_check_required(options))
    found += _check_world(options, world_size) if shapes_are_known else ()
    without_shapes = (_check_schedule, _check_optimizer, _check_data)
    if found or not shapes_are_known:
        return None, found + [problem for one in without_shapes for problem in one(options, None)]
    grid = layout(options.core, options.core.num_layers, world_size)
    _fill_defaults(options, grid)
    checks = (
        *(_check_model, _check_pipeline, _check_moe, _check_batch),
        *without_shapes,
    )
    found = [problem for one in checks for problem in one(options, grid)]
    found += problems_of_protections(options, grid, replicas, {})
    if replicas and options.logging.metrics_file is not None:
        problem = "--metrics-file does not go with replicas: all of them would write to this one file"
        found.append((problem, "drop it: each replica writes metrics.jsonl in its own folder in --run-dir"))
    here = {GPU: has_te if has_gpu is None else has_gpu, TE: has_te}
    wanted = needs(options, grid)
    if not assumes_machine:
        found += _check_transport(options, grid, has_gpu=here[GPU])
        found += unmet(wanted, lambda name: here[name] if name in here else is_here(name))
    return grid, found


def _check_transport(options, grid: Layout, *, has_gpu: bool) -> Iterator[Problem]:
    if has_gpu and options.core.distributed_backend == "gloo" and grid.pp > 1:
        # ProcessGroupGloo::send (torch) hands the tensor's address to a socket, whatever memory it is in.
        problem = "--distributed-backend gloo cannot send tensors of a GPU between pipeline stages"
        yield problem, "use nccl, or one stage"


def _fill_defaults(options, grid: Layout) -> None:
    """Fill in defaults that depend on other flags."""
    if options.training.global_batch_size is None:
        options.training.global_batch_size = options.training.micro_batch_size * grid.dp
    if options.core.max_position_embeddings is None:
        options.core.max_position_embeddings = options.data.seq_length
    if options.data.data_path and options.data.split is None:
        options.data.split = "969,30,1"
    if options.core.num_experts and options.core.moe_ffn_hidden_size is None:
        options.core.moe_ffn_hidden_size = options.core.ffn_hidden_size
    if grid.tp == 1:
        options.core.sequence_parallel = False  # as in Megatron-LM: there is nothing to split over


def _check_required(options) -> Iterator[Problem]:
    for concern, names in REQUIRED.items():
        for name in names:
            if getattr(getattr(options, concern), name) is None:
                yield f"--{name.replace('_', '-')} is missing", f"add --{name.replace('_', '-')} N"
    if not options.training.train_iters:
        yield "this trainer needs the length of the run in steps", "add --train-iters N"
    if options.core.lr is None:
        yield "--lr is missing", "add --lr RATE"


def _check_world(options, world_size: int) -> Iterator[Problem]:
    p = options.core
    tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    if world_size % (tp * pp * cp):
        need = tp * pp * cp
        yield (
            f"{world_size} ranks cannot be split into TP {tp} x PP {pp} x CP {cp} = {need}",
            f"start a multiple of {need} ranks, or change the sizes",
        )
        return
    ep, etp = p.expert_model_parallel_size, p.expert_tensor_parallel_size or tp
    if ep > 1 or p.expert_tensor_parallel_size:
        if world_size % (etp * ep * pp):
            yield (
                f"{world_size} ranks cannot be split into expert-TP {etp} x EP {ep} x PP {pp} = {etp * ep * pp}",
                f"start a multiple of {etp * ep * pp} ranks, or change the sizes",
            )
        if ep > 1 and not options.core.num_experts:
            yield f"--expert-model-parallel-size {ep} without experts", "add --num-experts N"
    dp, instances = world_size // (tp * pp * cp), p.num_distributed_optimizer_instances
    if (dp * cp) % instances:
        yield (
            f"{dp * cp} data-parallel ranks cannot be split into {instances} distributed-optimizer instances",
            f"make --num-distributed-optimizer-instances a divisor of {dp * cp}",
        )


def _unsplit(count: int, parts: int, what: str, where: str, unit: str = "") -> Iterator[Problem]:
    """Yield a problem if ``count``, described by ``what``, is not a multiple of ``parts``, described by ``where``."""
    if count % parts:
        yield f"{what} cannot be split over {where}", f"use a multiple of {parts}{unit}"


def _check_model(options, grid: Layout) -> Iterator[Problem]:
    m, seq = options.core, options.data.seq_length
    heads, groups = m.num_attention_heads, m.num_query_groups
    yield from _unsplit(heads, grid.tp, f"{heads} attention heads", f"TP {grid.tp}", " heads")
    if m.kv_channels == 0:
        yield f"{heads} heads for a hidden size of {m.hidden_size}", f"use at most {m.hidden_size} heads"
    if m.multi_latent_attention:
        pass
    elif m.group_query_attention:
        if heads % groups:
            yield f"{heads} heads cannot share {groups} query groups evenly", f"use a divisor of {heads} groups"
        yield from _unsplit(groups, grid.tp, f"{groups} query groups", f"TP {grid.tp}", " groups")
    elif groups not in (None, 1):
        yield f"--num-query-groups {groups} without --group-query-attention", "add --group-query-attention"
    yield from _unsplit(m.ffn_hidden_size, grid.tp, f"--ffn-hidden-size {m.ffn_hidden_size}", f"TP {grid.tp}")
    if m.max_position_embeddings < seq:
        yield (
            f"--max-position-embeddings {m.max_position_embeddings} is shorter than --seq-length {seq}",
            f"use --max-position-embeddings {seq}",
        )
    if m.sequence_parallel:
        yield from _unsplit(seq, grid.tp, f"--seq-length {seq}", f"TP {grid.tp}")
    if grid.cp > 1:
        yield from _unsplit(seq, 2 * grid.cp, f"--seq-length {seq}", f"2 x CP {grid.cp}")
    if m.position_embedding_type == "rope" and (m.kv_channels or 0) % 2:
        yield f"rotary embeddings need an even head width, this is {m.kv_channels}", "set --kv-channels"


def _check_pipeline(options, grid: Layout) -> Iterator[Problem]:
    p, layers = options.core, options.core.num_layers
    if grid.pp == 1:
        if p.num_layers_per_virtual_pipeline_stage or p.num_virtual_stages_per_pipeline_rank:
            yield "the interleaved schedule needs pipeline stages", "add --pipeline-model-parallel-size 2 or more"
        return
    chunks = grid.vpp or 1
    if p.pipeline_model_parallel_layout:
        yield from _check_given_stages(options, grid)
        return
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    rest = layers - (first or 0) - (last or 0)
    stages = grid.pp - (first is not None) - (last is not None)
    extra = p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    per_chunk = p.num_layers_per_virtual_pipeline_stage
    if rest < 0 or (stages == 0 and rest):
        yield (
            f"{first} layers on the first and {last} on the last of {grid.pp} stages do not make {layers}",
            "change --decoder-first-pipeline-num-layers / --decoder-last-pipeline-num-layers",
        )
    elif stages and (rest + extra) % (stages * chunks):
        yield (
            f"{rest + extra} layers cannot be split over {stages} pipeline stages x {chunks} model chunks",
            f"use a multiple of {stages * chunks} layers, or --decoder-first/last-pipeline-num-layers",
        )
    elif per_chunk and (layers + extra) // grid.pp % per_chunk:
        yield (
            f"{(layers + extra) // grid.pp} layers per stage cannot be cut into chunks of {per_chunk}",
            "change --num-layers-per-virtual-pipeline-stage",
        )
    if grid.vpp and not p.overlap_p2p_comm and grid.pp < 3:
        yield "the interleaved schedule without overlapped communication needs 3 stages", "use PP 3 or more"


def _check_given_stages(options, grid: Layout) -> Iterator[Problem]:
    stages = expanded(options.core.pipeline_model_parallel_layout)
    if len(stages) % grid.pp:
        yield (
            f"--pipeline-model-parallel-layout has {len(stages)} stages for PP {grid.pp}",
            f"give a multiple of {grid.pp} stages",
        )
    layers = "".join(stages).count("t")
    if layers != options.core.num_layers:
        yield (
            f"--pipeline-model-parallel-layout has {layers} layers, the model {options.core.num_layers}",
            "make them equal",
        )


def _check_moe(options, grid: Layout) -> Iterator[Problem]:
    moe = options.core
    if not moe.num_experts:
        return
    width = moe.moe_ffn_hidden_size
    yield from _unsplit(moe.num_experts, grid.ep, f"{moe.num_experts} experts", f"EP {grid.ep}", " experts")
    yield from _unsplit(width, grid.etp, f"--moe-ffn-hidden-size {width}", f"expert-TP {grid.etp}")
    if grid.tp > 1 and not options.core.sequence_parallel:
        yield "experts with tensor parallelism train only with sequence parallelism", "add --sequence-parallel"
    if isinstance(moe.moe_layer_freq, list) and len(moe.moe_layer_freq) != options.core.num_layers:
        yield (
            f"--moe-layer-freq describes {len(moe.moe_layer_freq)} layers, the model has {options.core.num_layers}",
            "make them equal",
        )
    if options.core.add_bias_linear and moe.moe_shared_expert_intermediate_size:
        yield "megatron-core's shared experts have no biases", "add --disable-bias-linear"
    elif options.core.add_bias_linear and grid.etp == grid.ep == 1 and not moe.moe_grouped_gemm:
        yield "megatron-core cannot add the biases of experts that no rank shares", "add --disable-bias-linear"
    if moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is None:
        yield "--moe-pad-expert-input-to-capacity needs a capacity", "add --moe-expert-capacity-factor 1.0"


def _check_batch(options, grid: Layout) -> Iterator[Problem]:
    group = options.core.microbatch_group_size_per_vp_stage or grid.pp
    size, micro = options.training.global_batch_size, options.training.micro_batch_size
    rank_samples = micro * grid.dp
    if size % rank_samples:
        yield (
            f"global batch {size} is not a multiple of micro batch {micro} x DP {grid.dp} = {rank_samples}",
            f"use a multiple of {rank_samples}",
        )
    elif grid.vpp:
        microbatches = size // rank_samples
        if microbatches < group or 0 < microbatches % group < grid.pp:
            yield (
                f"{microbatches} microbatches do not fit the interleaved schedule in groups of {group}",
                f"make global batch / (micro batch x DP) a multiple of {group}",
            )


def _check_schedule(options, grid: Layout) -> Iterator[Problem]:
    s, steps = options.schedule, options.training.train_iters
    if s.lr_decay_style == "WSD":
        yield "--lr-decay-style WSD is not a schedule of this trainer", "use cosine or linear, or --nvidia-trainer"
    decay = s.lr_decay_iters or steps
    if steps and s.lr_warmup_iters >= decay and s.lr_decay_style != "constant":
        yield (
            f"--lr-warmup-iters {s.lr_warmup_iters} does not end before the decay of {decay} steps",
            "shorten the warm-up or lengthen --lr-decay-iters",
        )


def _check_optimizer(options, grid: Layout | None) -> Iterator[Problem]:
    if getattr(options.core, "use_megatron_fsdp", False):
        yield (
            "--use-megatron-fsdp shards parameters in a way that this trainer neither saves nor recovers",
            "use --use-distributed-optimizer, which shards the optimizer's state",
        )
    if options.core.tp_comm_overlap:
        yield (
            "--tp-comm-overlap needs buffers of Transformer Engine, which this trainer does not make",
            "drop it, or use --nvidia-trainer, which makes them",
        )
    if options.core.optimizer == "sgd" and options.core.use_distributed_optimizer:
        yield "--optimizer sgd has no sharded state for --use-distributed-optimizer", "drop one of them"


def _check_data(options, grid: Layout) -> Iterator[Problem]:
    d = options.data
    if not (d.mock_data or d.data_path):
        yield "there is nothing that this trainer can train on", "add --data-path PREFIX or --mock-data"
    if len(d.data_path or []) > 1:
        yield (
            f"--data-path has {len(d.data_path)} words, and this trainer reads one dataset",
            "give one prefix, without a weight, or use --nvidia-trainer, which reads blends of datasets",
        )
    if d.reset_attention_mask and options.core.transformer_impl == "transformer_engine":
        yield "--reset-attention-mask needs explicit masks", "add --transformer-impl local"
