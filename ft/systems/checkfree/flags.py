"""Checks the flags of CheckFree and CheckFree+.

CheckFree rebuilds a lost pipeline stage as a mean of its two neighbours, so a stage needs two neighbours with as many
transformer blocks as it has. With data parallelism, a stage that is lost in part needs no neighbours. CheckFree+ can
rebuild the first and the last stage, too: half of the microbatches pass the first two stages, and the last two, in
swapped order.
"""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem
from ft.systems.schedule.program import LEAST_STAGES


def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
    """Yield (problem, fix) for flags that cannot work together."""
    yield from _check_rebuilds(options, grid)
    yield from _check_swapped(options, grid)


def _check_rebuilds(options: Any, grid: Any) -> Iterator[Problem]:
    asked, p = options.fault_tolerance, options.core
    if not asked.rebuilds_stages:
        return
    if not asked.ft_hot_swap:
        yield "--ft-checkfree needs hot-swap", "add --ft-hot-swap and start with ft run"
    uneven = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    counts = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    ends = [layers is not None or counted for layers, counted in zip(uneven, counts, strict=True)]
    alike = grid.pp - sum(ends)  # the stages between the ends have as many layers each
    if alike < 3 and grid.dp < 2:
        yield (
            f"--ft-checkfree with {alike} pipeline stage(s) of the same number of layers: none has two such neighbours",
            "give --pipeline-model-parallel-size 3 or more, and split the layers evenly",
        )
    if asked.ft_checkfree_plus and grid.vpp:
        yield (
            "--ft-checkfree-plus has no interleaved schedule with swapped stages",
            "drop --num-layers-per-virtual-pipeline-stage, or use --ft-checkfree",
        )
    if asked.ft_checkfree_plus and options.core.optimizer_cpu_offload:
        yield (
            "--ft-checkfree-plus does not set the weights of --optimizer-cpu-offload to those of rebuilt ends",
            "drop one of the two, or use --ft-checkfree",
        )
    if asked.ft_checkfree_plus and (any(ends) or p.pipeline_model_parallel_layout):
        yield "--ft-checkfree-plus needs stages with the same number of layers", "split the layers evenly"
    yield from _check_numbers(options)


def _check_swapped(options: Any, grid: Any) -> Iterator[Problem]:
    """Check what CheckFree+ needs in addition: at least four stages, as the first two have to differ from the last two,
    and at least two microbatches, of which one half is swapped.
    """
    asked, training = options.fault_tolerance, options.training
    if not asked.ft_checkfree_plus:
        if asked.ft_checkfree_most_in_flight is not None:
            yield (
                "--ft-checkfree-most-in-flight limits the schedule of --ft-checkfree-plus, which is not given",
                "give both, or neither",
            )
        return
    if options.core.mtp_num_layers:
        yield (
            "--mtp-num-layers has layers behind the output layer, and --ft-checkfree-plus has no copies of them",
            "drop one of the two, or use --ft-checkfree",
        )
    per_rank = training.micro_batch_size * grid.dp
    ramp = getattr(training, "rampup_batch_size", None)  # the reference trainer has none
    smallest = ramp[0] if ramp else training.global_batch_size
    least = min(grid.pp, training.global_batch_size // per_rank)
    if asked.ft_checkfree_most_in_flight is not None and asked.ft_checkfree_most_in_flight < least:
        yield (
            f"--ft-checkfree-most-in-flight is {asked.ft_checkfree_most_in_flight}, but in every schedule some stage "
            f"holds {least} microbatches at once",
            f"give --ft-checkfree-most-in-flight {least} or more",
        )
    if grid.pp < LEAST_STAGES:
        problem = f"--ft-checkfree-plus swaps the first two and the last two of {grid.pp} pipeline stage(s)"
        yield problem, f"give --pipeline-model-parallel-size {LEAST_STAGES} or more"
    if smallest < 2 * per_rank:
        yield (
            "--ft-checkfree-plus swaps half of the microbatches of a step, but a step has only one",
            f"give --{'rampup-batch-size' if ramp else 'global-batch-size'} {2 * per_rank} or more",
        )


def _check_numbers(options: Any) -> Iterator[Problem]:
    asked = options.fault_tolerance
    if not 0.0 < asked.ft_checkfree_lr_factor <= 100.0:
        yield f"--ft-checkfree-lr-factor is {asked.ft_checkfree_lr_factor}", "give a factor above 0 and up to 100"
    if asked.ft_checkfree_lr_decay_iters < 0:
        yield (
            f"--ft-checkfree-lr-decay-iters is {asked.ft_checkfree_lr_decay_iters}",
            "give 0 (the factor does not decay) or more",
        )
    if asked.ft_checkfree_strategy == "weighted" and not options.core.clip_grad:
        yield (
            "--ft-checkfree-strategy weighted needs gradient norms, which are computed for clipping only, and "
            "--clip-grad is 0",
            "give --clip-grad a large number, or use --ft-checkfree-strategy uniform",
        )
