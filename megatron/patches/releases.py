"""Compatibility layer for differences between megatron-core releases: one function for each difference.

All other code is written as if there were a single release. Each function names the release that introduced the
difference. Megatron-core is called "core" here.
"""

import torch

from ft.base.errors import UserError
from megatron.core import package_info, parallel_state
from megatron.core import utils as core_utils
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules

# (major, minor) of the installed megatron-core.
CORE = (package_info.MAJOR, package_info.MINOR)


def batch_of_this_context_rank(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Return the part of a batch ([micro batch, sequence, ...] each) that this context-parallel rank computes.

    From 0.18 on, core takes an argument for context-parallel groups that change from batch to batch (here they never
    do), and uses the whole world if no group is passed.
    """
    group = parallel_state.get_context_parallel_group()
    if CORE >= (0, 18):
        return core_utils.get_batch_on_this_cp_rank(batch, False, group)
    return core_utils.get_batch_on_this_cp_rank(batch, group)


def backward_step(taken, output, gradient, kind, config):
    """Run core's backward of one microbatch, and return the gradient of ``taken``.

    Args:
        taken: the stage's input activation.
        output: the stage's output activation.
        gradient: gradient of ``output``, None on the last stage.
        kind: the model's ``ModelType``, which core needs up to 0.16.
        config: configuration of the model.
    """
    if CORE >= (0, 17):
        return schedules.backward_step(taken, output, gradient, config)
    return schedules.backward_step(taken, output, gradient, kind, config)


def clear_cached_collective_results(optimizer) -> None:
    """Clear the results of collectives that core runs once per process and then caches
    (``manifest.ONCE_PER_PROCESS``).

    This function is not collective. From 0.19 on, an optimizer determines with an all-reduce whether any rank has
    parameters whose norm is computed separately, and caches the result. After a recovery all ranks have to repeat this
    all-reduce, because a worker that has just joined runs it.
    """
    for part in (optimizer, *getattr(optimizer, "chained_optimizers", ())):
        if hasattr(part, "_has_grad_norm_group_cache"):
            part._has_grad_norm_group_cache = None


def optimizer_of(config, chunks, *, with_gloo: bool):
    """Return core's optimizer over ``chunks``.

    Args:
        config: core's configuration of the optimizer.
        chunks: this rank's model chunks, wrapped in ``DistributedDataParallel``.
        with_gloo: whether there are gloo groups.
    """
    more = _width_scaling(config, chunks[0].config)
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=with_gloo, **more)


def _width_scaling(config, model_config) -> dict:
    """Return the argument with which core scales the learning rates with the width of the model (--use-mup)."""
    if not getattr(model_config, "use_mup", False):
        return {}
    from megatron.core import optimizer

    of_width = getattr(optimizer, "get_mup_config_overrides")  # noqa: B009 - missing in releases without --use-mup
    width = {"mup_width_mult": model_config.mup_width_mult, "optimizer_type": config.optimizer}
    return {"config_overrides": optimizer.get_standard_config_overrides(config) | of_width(config, **width)}


def refuse_captured_update(optimizer) -> None:
    """Reject an optimizer step that is captured as a CUDA graph (core's ``--optimizer-cuda-graph``, from 0.17 on).

    Such a step is counted and captured once per process, between two barriers: a worker that joins later would wait
    alone at these barriers.

    Raises:
        UserError: ``optimizer.step`` is such a step.
    """
    if CORE < (0, 17):
        return
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    if isinstance(optimizer.step, OptimizerCudaGraphWrapper):
        raise UserError(
            "an optimizer step captured as a CUDA graph cannot be protected: a worker that joins later would capture "
            "it alone",
            "leave --optimizer-cuda-graph out",
        )
