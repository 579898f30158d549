"""Check the command-line flags for combinations that cannot work, before any process group is created.

Each ``_check_*`` is a pure function of the options and the parallel layout that yields (problem, fix) pairs; a problem
names the numbers that do not fit together. What megatron-core's configurations check themselves (heads, layers, experts
and their split over ranks, recomputation, number formats) is not checked here: ``model.transformer_config`` reports it.
"""

from collections.abc import Iterator

from ft.base.errors import Problem, UserError
from ft.protection.table import problems as problems_of_protections
from megatron.ft_trainer.arguments.layout import Layout, layout
from megatron.ft_trainer.arguments.needs import GPU, TE, is_installed, needs, unmet

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
    found = [problem for one in (_check_model, _check_batch, *without_shapes) for problem in one(options, grid)]
    found += problems_of_protections(options, grid, replicas, {})
    if replicas and options.logging.metrics_file is not None:
        problem = "--metrics-file does not go with replicas: all of them would write to this one file"
        found.append((problem, "drop it: each replica writes metrics.jsonl in its own folder in --run-dir"))
    here = {GPU: has_te if has_gpu is None else has_gpu, TE: has_te}
    wanted = needs(options, grid)
    if not assumes_machine:
        found += _check_transport(options, grid, has_gpu=here[GPU])
        found += unmet(wanted, lambda name: here[name] if name in here else is_installed(name))
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
    if m.max_position_embeddings < seq:
        yield (
            f"--max-position-embeddings {m.max_position_embeddings} is shorter than --seq-length {seq}",
            f"use --max-position-embeddings {seq}",
        )
    if m.sequence_parallel:
        yield from _unsplit(seq, grid.tp, f"--seq-length {seq}", f"TP {grid.tp}")
    if grid.cp > 1:
        yield from _unsplit(seq, 2 * grid.cp, f"--seq-length {seq}", f"2 x CP {grid.cp}")
    if grid.pp == 1 and (m.num_layers_per_virtual_pipeline_stage or m.num_virtual_stages_per_pipeline_rank):
        yield "the interleaved schedule needs pipeline stages", "add --pipeline-model-parallel-size 2 or more"
    if grid.vpp and not m.overlap_p2p_comm and grid.pp < 3:
        yield "the interleaved schedule without overlapped communication needs 3 stages", "use PP 3 or more"
    if m.num_experts and grid.tp > 1 and not m.sequence_parallel:
        yield "experts with tensor parallelism train only with sequence parallelism", "add --sequence-parallel"
    if m.num_experts and m.add_bias_linear and m.moe_shared_expert_intermediate_size:
        yield "megatron-core's shared experts have no biases", "add --disable-bias-linear"
    elif m.num_experts and m.add_bias_linear and grid.etp == grid.ep == 1 and not m.moe_grouped_gemm:
        yield "megatron-core cannot add the biases of experts that no rank shares", "add --disable-bias-linear"


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
