"""Hooks in megatron-core (core) and torch.distributed that drive DMR (dual modular redundancy, SpareTrain).

DMR executes every operator of a training step twice and compares the results, to catch silent data corruption. The
hooks call DMR's ``ft.systems.dmr.runtime.engine.Engine`` at each forward and backward pass of a microbatch, for each
function that activation checkpointing recomputes, and at communication windows: a window is the time in which this rank
waits for communication, so that the engine can execute operators a second time without slowing down training. Without
an active engine, core behaves as before.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from megatron.patches.manifest import Patch
from megatron.patches.step_state import bucket_groups

_listener: Any = None
_is_waiting = False


def listen(listener: Any) -> None:
    """Make the hooks call ``listener``, an ``Engine``, from now on; None: the hooks do nothing."""
    global _listener
    _listener = listener


def follow(ways: Sequence[Sequence[int]]) -> None:
    """Announce the routes of the microbatches of an iteration that is about to begin; see ``Engine.follow``."""
    listener = active()
    if listener is not None:
        listener.follow(ways)


def active() -> Any:
    """Return the listener, if it wants to be called now."""
    return _listener if _listener is not None and _listener.is_active else None


_signature = cache(inspect.signature)


def _forward_step(run, *args, **kwargs):
    listener = active()
    if listener is None:
        return run(*args, **kwargs)
    given = _signature(run).bind(*args, **kwargs).arguments
    chunk, microbatch = given.get("vp_stage") or 0, given.get("current_microbatch")
    return listener.forward_step(partial(run, *args, **kwargs), chunk, given["input_tensor"], _outputs, microbatch)


def _outputs(result: tuple) -> Any:
    return result[0]


def _backward_step(run, input_tensor, output_tensor, output_tensor_grad, *rest):
    step = partial(run, input_tensor, output_tensor, output_tensor_grad, *rest)
    listener = active()
    return step() if listener is None else listener.backward_step(step, output_tensor, output_tensor_grad)


def _on_its_way(run, **kwargs):
    """Wrap p2p requests so that each wait for one is a window.

    The window does not begin when the communication starts, because core may compute between the start and the wait.
    """
    requests, listener = run(**kwargs), active()
    if listener is None:
        return requests

    def opens() -> None:
        listener.window("p2p")

    if isinstance(requests, dict):
        return {name: _Awaited(request, opens) for name, request in requests.items()}
    return [_Awaited(request, opens) for request in requests]


def _recomputed(run, context, function, *args):
    """Run an activation-checkpointed ``function``, which core calls again in the backward.

    ``context``: the context of ``CheckpointFunction``, or a ``CheckpointWithoutOutput``, which discards the output and
    recomputes it later.
    """
    listener = active()
    return run(context, function if listener is None else listener.recomputed(function), *args)


def _finish_grad_sync(finish, self, force_all_reduce=False):
    listener = active()
    if listener is None:
        return finish(self, force_all_reduce=force_all_reduce)
    waits = any(group.grad_reduce_handle is not None for group in bucket_groups(self))
    with _window(lambda: listener.window("dp")) if waits else nullcontext():
        finish(self, force_all_reduce=force_all_reduce)
    listener.completed([bucket.grad_data for group in bucket_groups(self) for bucket in group.buckets])
    return None


def _param_sync(run, self, *args, **kwargs):
    """Report to the listener that the parameters of a bucket group are gathered, if no gather is still in flight."""
    run(self, *args, **kwargs)
    listener = active()
    if listener is not None and self.param_gather_handle is None:
        listener.completed([bucket.param_data for bucket in self.buckets])


def _all_reduce(run, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    return _watched("all_reduce", partial(run, tensor, op, group), [tensor], tensor, group, async_op, op=op)


def _all_gather_list(run, tensor_list, tensor, group=None, async_op=False):
    return _watched("all_gather", partial(run, tensor_list, tensor, group), tensor_list, tensor, group, async_op)


def _all_gather(run, output_tensor, input_tensor, group=None, async_op=False):
    call = partial(run, output_tensor, input_tensor, group=group)
    return _watched("all_gather", call, [output_tensor], input_tensor, group, async_op)


def _reduce_scatter(run, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    call = partial(run, output, input, op=op, group=group)
    return _watched("reduce_scatter", call, [output], input, group, async_op, op=op)


def _all_to_all_single(run, output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    call = partial(run, output, input, output_split_sizes, input_split_sizes, group)
    listener = active()
    if listener is None:
        return call(async_op=async_op)
    members = dist.get_world_size(group)
    splits = tuple(
        [len(tensor) // members] * members if sizes is None or not len(sizes) else list(sizes)
        for sizes, tensor in ((output_split_sizes, output), (input_split_sizes, input))
    )
    return _watched("all_to_all", call, [output], input, group, async_op, splits=splits)


def _watched(
    kind: str,
    call: Callable[..., Any],
    outputs: Sequence[Any],
    source: Any,
    group: Any,
    async_op: bool,
    **details: Any,
) -> Any:
    """Run a collective, and report its beginning, its window and its end to the listener.

    Args:
        kind, outputs, source, details: as for ``Engine.communicates``.
        call: starts the collective, asynchronously if its argument ``async_op`` is true, and returns its handle.
        group: the process group; None: of all ranks.
        async_op: whether the caller waits for the end itself.
    """
    listener = active()
    group = dist.group.WORLD if group is None else group
    if listener is None or dist.get_world_size(group) == 1:
        return call(async_op=async_op)
    is_coalesced = group in dist.distributed_c10d._world.pg_coalesce_state
    begun = listener.communicates(kind, group, outputs, source, is_coalesced=is_coalesced, **details)
    if is_coalesced:
        return call(async_op=async_op)
    work = call(async_op=True)
    if work is None:  # this rank is not in the group
        return None

    def opens() -> None:
        if kind == "all_to_all":
            listener.dynamic_window(work.is_completed)
        else:
            listener.window("tp")

    watched = _Awaited(work, opens, lambda: listener.communicated(begun))
    if async_op:
        return watched
    watched.wait()
    return None


@contextmanager
def _window(opens: Callable[[], None]) -> Iterator[None]:
    """Return a context in which this rank waits for communication. ``opens`` tells the listener that it begins; a wait
    within another wait is a part of that one."""
    global _is_waiting
    listener = active()
    if listener is None or _is_waiting:
        yield
        return
    _is_waiting = True
    try:
        opens()
        yield
        listener.waited()
    finally:
        _is_waiting = False


class _Awaited:
    """The handle of a p2p request or a collective. The first ``wait`` is a window, and then calls ``ended``.

    Args:
        work: torch's handle.
        opens: tells the listener that a window begins.
        ended: called once, after the window.
    """

    def __init__(self, work: Any, opens: Callable[[], None], ended: Callable[[], None] = lambda: None):
        self._work, self._opens, self._ended = work, opens, ended

    def wait(self, *args: Any) -> Any:
        if self._opens is None:
            return self._work.wait(*args)
        with _window(self._opens):
            result = self._work.wait(*args)
        self._opens = None
        self._ended()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _compiled(run: Any, graph: Any, inputs: Any) -> Any:
    listener = active()
    return run(graph, inputs) if listener is None else listener.compiled(graph, partial(run, graph), inputs)


_SENT = "deferred operators are verified while tensors are sent to other stages (D-DMR)"
_SEGMENT = "the recomputation of a segment is the second execution of its forward (P-DMR)"
_GATHERED = "DMR checks that all ranks have the same parameters after they were gathered"
_ALL_GATHER = "DMR checks what an all-gather brings"
_P2P_SIGNATURES = (
    "(*, tensor_send_prev, tensor_recv_prev, tensor_send_next, tensor_recv_next, group, prev_pipeline_rank, "
    "next_pipeline_rank)",
)
_CORE = "megatron.core."
_SCHEDULES, _P2P = f"{_CORE}pipeline_parallel.schedules", f"{_CORE}pipeline_parallel.p2p_communication"
_RANDOM, _BUFFER = f"{_CORE}tensor_parallel.random", f"{_CORE}distributed.param_and_grad_buffer"
PATCHES = (
    Patch(
        _SCHEDULES,
        "forward_step",
        "DMR follows the forward of every microbatch, and computes digests of what a stage receives and sends",
        _forward_step,
        (
            "(forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config, "
            "cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, "
            "is_first_microbatch=False, current_microbatch=None, vp_stage=None, is_last_stage=True)",
        ),
    ),
    Patch(
        _SCHEDULES,
        "backward_step",
        "DMR follows the backward of every microbatch",
        _backward_step,
        (
            "(input_tensor, output_tensor, output_tensor_grad, model_type, config)",
            "(input_tensor, output_tensor, output_tensor_grad, config)",
        ),
    ),
    Patch(_P2P, "_batched_p2p_ops", _SENT, _on_its_way, _P2P_SIGNATURES),
    Patch(_P2P, "_p2p_ops", _SENT, _on_its_way, _P2P_SIGNATURES),
    Patch(
        _RANDOM,
        "CheckpointFunction.forward",
        _SEGMENT,
        _recomputed,
        ("(ctx, run_function, distribute_saved_activations, *args)",),
    ),
    Patch(_RANDOM, "CheckpointWithoutOutput.checkpoint", _SEGMENT, _recomputed, ("(self, run_function, *args)",)),
    Patch(
        f"{_CORE}distributed.distributed_data_parallel",
        "DistributedDataParallel.finish_grad_sync",
        "deferred operators are verified while gradients are reduced (D-DMR)",
        _finish_grad_sync,
        ("(self, force_all_reduce=False)",),
    ),
    Patch(_BUFFER, "_ParamAndGradBucketGroup.start_param_sync", _GATHERED, _param_sync, ("(self, force_sync=False)",)),
    Patch(
        _BUFFER,
        "_ParamAndGradBucketGroup.finish_param_sync",
        _GATHERED,
        _param_sync,
        ("(self, skip_next_bucket_dispatch=False)",),
    ),
    *(
        Patch(module, name, why, wrapper)
        for module in (f"{_CORE}tensor_parallel.mappings", f"{_CORE}tensor_parallel.layers", _BUFFER)
        for name, why, wrapper in (
            ("dist_all_gather_func", _ALL_GATHER, _all_gather),
            ("dist_reduce_scatter_func", "DMR checks the sums that a reduce-scatter computes", _reduce_scatter),
        )
    ),
    Patch("torch.distributed", "all_gather", _ALL_GATHER, _all_gather_list),
    Patch(
        "torch.distributed",
        "all_reduce",
        "DMR checks that all ranks of a group have the same result of an all-reduce, and the right sum",
        _all_reduce,
    ),
    Patch(
        "torch.distributed",
        "all_to_all_single",
        "DMR checks what arrives, and verifies deferred operators meanwhile (D-DMR)",
        _all_to_all_single,
    ),
    Patch(
        "torch._inductor.output_code",
        "CompiledFxGraph.__call__",
        "the kernels of graphs that torch.compile has compiled bypass torch's dispatcher; DMR executes a graph twice",
        _compiled,
        ("(self, inputs)",),
    ),
)
