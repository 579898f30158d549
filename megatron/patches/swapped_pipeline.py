"""The model and the 1F1B pipeline schedule of megatron-core for CheckFree+ (CheckFree, section 4.3).

CheckFree+ trains half of the microbatches with the first two and the last two pipeline stages swapped, so that a lost
first or last stage can be rebuilt from its neighbour. The first two stages have the embedding and the last two the
output layer. A trainer does not notice: core's model is built so, and core's answers to "is this stage the first one?"
and "is it the last one?" are those for the microbatch, or for the datasets, that the trainer asks about.

Training steps run a schedule that was planned for this; evaluation runs core's own schedule.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.patches.manifest import Patch

_make: Callable[[], Any] | None = None
_ends: Any = None
_place: tuple[bool, bool] | None = None
_run: Callable[..., Any] | None = None
_plainly: Callable[[Callable[[], Any]], Any] | None = None


def build_with(make: Callable[[], Any]) -> None:
    """Build the model with embedding and output layer on two stages each.

    Args:
        make: called on all ranks when core's process groups exist; returns
            ``ft.systems.checkfree.plus.ReplicatedEnds``.
    """
    global _make
    _make = make


def use(run: Callable[..., Any], plainly: Callable[[Callable[[], Any]], Any]) -> None:
    """Set the functions that execute training iterations and evaluation.

    Args:
        run: gets core's keyword arguments for data, model and sizes, and the process groups as ``groups``.
        plainly: gets a function that runs core's schedule.
    """
    global _run, _plainly
    _run, _plainly = run, plainly


@contextmanager
def placed(*, first: bool, last: bool) -> Iterator[None]:
    """In this context, this stage is the ``first`` or the ``last`` one, or neither, for whoever asks core."""
    global _place
    before, _place = _place, (first, last)
    try:
        yield
    finally:
        _place = before


def reading() -> AbstractContextManager[None]:
    """Return a context in which a stage that has an embedding is the first one, and one that has an output layer the
    last one: it needs the datasets that these read.
    """
    return nullcontext() if _ends is None else placed(first=_ends.embeds, last=_ends.heads)


def _initialize(by_core: Callable[..., None], *args: Any, **given: Any) -> None:
    """Make core's process groups. The embedding group, in which tied weights are summed, has four stages."""
    global _ends
    if _make is None:
        by_core(*args, **given)
        return
    by_core(*args, **{**given, "get_embedding_ranks": lambda pipeline: [*pipeline[:2], *pipeline[-2:]]})
    _ends = _make()


def _answer(end: int, by_core: Callable[..., bool], *args: Any, **given: Any) -> bool:
    return by_core(*args, **given) if _place is None else _place[end]


def _build(by_core: Callable[..., None], *args: Any, **given: Any) -> None:
    values = inspect.signature(by_core).bind(*args, **given).arguments
    if _ends is None:
        by_core(**values)
        return
    if _ends.embeds and _ends.holds_copy and values.get("share_embeddings_and_output_weights"):
        # Core makes all copies of a tied weight equal by summing them.
        values["config"].embedding_init_method = torch.nn.init.zeros_
    by_core(**{**values, "pre_process": _ends.embeds, "post_process": _ends.heads})
    _ends.built(values["self"])


def _forward_backward(run_by_core, *, forward_step_func, data_iterator, model, num_microbatches, **others):
    given = {"forward_step_func": forward_step_func, "data_iterator": data_iterator, "model": model}

    def by_core() -> Any:
        return run_by_core(**given, num_microbatches=num_microbatches, **others)

    if _run is None or _plainly is None:
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


_ASKED = ("(ignore_virtual=True, vp_stage=None)",)
PATCHES = (
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_pipelining_without_interleaving",
        "half of the microbatches pass the first two and the last two stages in swapped order (CheckFree+)",
        _forward_backward,
        (
            "(*, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, "
            "decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None, "
            "adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False)",
        ),
    ),
    Patch(
        parallel_state.__name__,
        "initialize_model_parallel",
        "the first two and the last two stages share the embedding's weight, if it is tied (CheckFree+)",
        _initialize,
    ),
    Patch(
        "megatron.core.models.gpt.gpt_model",
        "GPTModel.__init__",
        "the first two stages have the embedding, and the last two the output layer (CheckFree+)",
        _build,
    ),
    *(
        Patch(
            parallel_state.__name__,
            f"is_pipeline_{end}_stage",
            f"another stage is the {end} one for half of the microbatches (CheckFree+)",
            partial(_answer, number),
            _ASKED,
        )
        for number, end in enumerate(("first", "last"))
    ),
)
"""Without :func:`build_with` and :func:`use`, the wrappers do what core does."""
