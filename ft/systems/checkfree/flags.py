"""Checks of CheckFree's flags: stages need the same number of transformer blocks each, and two neighbours."""

from collections.abc import Iterator
from typing import Any

from ft.base.errors import Problem
from ft.systems.schedule.routes import LEAST_STAGES


def check(options: Any, grid: Any, replicas: int) -> Iterator[Problem]:
    """Yield (problem, fix); see :meth:`ft.protection.contract.Protection.check`."""
    yield from _check_rebuilds(options, grid)
    yield from _check_swapped(options, grid)


def _check_rebuilds(options: Any, grid: Any) -> Iterator[Problem]:
    asked, p = options.fault_tolerance, options.core
    if not asked.rebuilds_stages:
        return
    if not asked.ft_hot_swap:
        yield "--ft-checkfree needs hot-swap", "add --ft-hot-swap and start with ft run"
    if grid.pp < 3:
        yield f"--ft-checkfree with {grid.pp} pipeline stage(s): none has two neighbours", "use PP 3 or more"
    if grid.vpp:
        yield (
            "--ft-checkfree with the interleaved schedule: a stage's layers do not lie between its neighbours'",
            "drop --num-layers-per-virtual-pipeline-stage",
        )
    uneven = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    if (
        any(layers is not None for layers in uneven)
        or p.account_for_embedding_in_pipeline_split
        or p.account_for_loss_in_pipeline_split
    ):
        yield "--ft-checkfree needs stages with the same number of layers", "split the layers evenly"
    yield from _check_numbers(options)


def _check_swapped(options: Any, grid: Any) -> Iterator[Problem]:
    """Check what CheckFree+ needs in addition: pipeline ends that do not overlap, and microbatches to swap."""
    asked, training = options.fault_tolerance, options.training
    if not asked.ft_checkfree_plus:
        if asked.ft_checkfree_most_in_flight is not None:
            yield "--ft-checkfree-most-in-flight bounds the schedule of --ft-checkfree-plus", "give both, or neither"
        return
    per_rank = training.micro_batch_size * grid.dp
    least = min(grid.pp, training.global_batch_size // per_rank)
    if asked.ft_checkfree_most_in_flight is not None and asked.ft_checkfree_most_in_flight < least:
        yield f"no schedule holds {asked.ft_checkfree_most_in_flight} microbatches at most", f"{least} or more"
    if grid.pp < LEAST_STAGES:
        problem = f"--ft-checkfree-plus swaps the first two and the last two of {grid.pp} pipeline stage(s)"
        yield problem, f"--pipeline-model-parallel-size {LEAST_STAGES} or more"
    if training.global_batch_size < 2 * per_rank:
        yield "--ft-checkfree-plus swaps half of the microbatches: there is only one", "2 microbatches or more"
    if training.rampup_batch_size is not None and training.rampup_batch_size[0] < 2 * per_rank:
        yield "a step of the ramp-up has one microbatch (--ft-checkfree-plus)", "begin with 2 microbatches or more"


def _check_numbers(options: Any) -> Iterator[Problem]:
    asked = options.fault_tolerance
    if not 0.0 < asked.ft_checkfree_lr_factor <= 100.0:
        yield f"--ft-checkfree-lr-factor is {asked.ft_checkfree_lr_factor}", "above 0, up to 100"
    if asked.ft_checkfree_lr_decay_iters < 0:
        yield f"--ft-checkfree-lr-decay-iters is {asked.ft_checkfree_lr_decay_iters}", "0 (the factor stays) or more"
    if asked.ft_checkfree_strategy == "weighted" and not options.core.clip_grad:
        yield (
            "--ft-checkfree-strategy weighted with --clip-grad 0: gradient norms are taken for clipping only",
            "give --clip-grad a large number, or use --ft-checkfree-strategy uniform",
        )
