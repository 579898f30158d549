"""Replaces megatron-core's 1F1B pipeline schedule for CheckFree+ (CheckFree, section 4.3).

CheckFree+ trains half of the microbatches with the first two and the last two pipeline stages swapped, so that a lost
first or last stage can be rebuilt from its neighbour. Training steps run a schedule that was planned for this;
evaluation runs core's own schedule.
"""

from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.patches.replace import wrap

_MODULE, _NAME = "megatron.core.pipeline_parallel.schedules", "forward_backward_pipelining_without_interleaving"

_run: Callable[..., Any] | None = None
_plainly: Callable[[Callable[[], Any]], Any] | None = None


def apply() -> None:
    """Replace core's schedule; without :func:`use`, the replacement runs core's schedule."""
    wrap(_MODULE, _NAME, _forward_backward)


def use(run: Callable[..., Any] | None, plainly: Callable[[Callable[[], Any]], Any] | None = None) -> None:
    """Set the functions that execute training iterations and evaluation.

    Args:
        run: gets core's keyword arguments for data, model and sizes, and the process groups as ``groups``. None: core's
            schedule executes training, too.
        plainly: gets a function that runs core's schedule.
    """
    global _run, _plainly
    _run, _plainly = run, plainly


def used() -> tuple[Callable[..., Any] | None, Callable[[Callable[[], Any]], Any] | None]:
    """Return the arguments of the last call of ``use``."""
    return _run, _plainly


def _forward_backward(run_by_core, *, forward_step_func, data_iterator, model, num_microbatches, **others):
    given = {"forward_step_func": forward_step_func, "data_iterator": data_iterator, "model": model}

    def by_core() -> Any:
        return run_by_core(**given, num_microbatches=num_microbatches, **others)

    if _run is None:
        return by_core()
    if others.get("forward_only", False):
        return _plainly(by_core)
    sizes = {name: others[name] for name in ("seq_length", "micro_batch_size")}
    return _run(**given, num_microbatches=num_microbatches, **sizes, groups=_groups())


def _groups() -> ProcessGroupCollection:
    """Return the process groups that core collects for its own schedule."""
    found = ProcessGroupCollection()
    found.tp = parallel_state.get_tensor_model_parallel_group()
    found.pp = parallel_state.get_pipeline_model_parallel_group()
    found.cp = parallel_state.get_context_parallel_group()
    found.embd = parallel_state.get_embedding_group(check_initialized=False)
    found.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    found.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return found
