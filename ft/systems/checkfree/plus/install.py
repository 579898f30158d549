"""Setup of CheckFree+ (CheckFree, section 4.3) on one rank."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ft.systems.checkfree.plus.pipeline import forward_backward
from ft.systems.checkfree.plus.replicated_ends import ReplicatedEnds
from ft.systems.checkfree.plus.stage_ends import in_place
from ft.systems.schedule.program import Program
from megatron.patches import instances, swapped_pipeline


def install(chunk: torch.nn.Module, ends: ReplicatedEnds, plan: Callable[[int], Program]) -> None:
    """Train ``chunk`` by planned schedules. Call it after core's callbacks have been set.

    Args:
        chunk: the ``DistributedDataParallel`` model chunk of this stage.
        ends: the replicas of embedding and head.
        plan: returns the schedule for a number of microbatches.
    """
    config = chunk.config
    planned = cache(plan)

    def finalize_replicated_ends(
        finalize: Callable, model: Any, tokens: torch.Tensor | None = None, **groups: Any
    ) -> None:
        ends.sum_tokens(tokens)
        finalize(model, tokens, **groups)
        ends.sum_gradients(chunk)

    def run(*, num_microbatches: int, **given: Any) -> list[torch.Tensor]:
        losses = forward_backward(planned(num_microbatches))(num_microbatches=num_microbatches, **given)
        return ends.sum_losses(losses)

    def plainly(by_core: Callable[[], Any]) -> Any:
        return in_place(chunk, ends.roles.stage, ends.roles.stages, by_core)

    instances.around(config, "finalize_model_grads_func", finalize_replicated_ends)
    swapped_pipeline.use(run, plainly)
