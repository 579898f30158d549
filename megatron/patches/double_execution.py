"""Hooks in megatron-core (core) and torch.distributed that drive DMR (dual modular redundancy, SpareTrain).

DMR executes every operator of a training step twice and compares the results, to catch silent data corruption. The
hooks call a ``Listener``, DMR's engine, at each forward and backward pass of a microbatch, for each function that
activation checkpointing recomputes, and at communication windows: a window is the time in which this rank waits for
communication, so that the engine can execute operators a second time without slowing down training. Without an active
``Listener``, core behaves as before.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist

from megatron.patches.replace import original, replace
from megatron.patches.step_state import bucket_groups

_SCHEDULES, _P2P = "megatron.core.pipeline_parallel.schedules", "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM, _PARALLEL = "megatron.core.tensor_parallel.random", "megatron.core.distributed.distributed_data_parallel"
_SEGMENT, _OUTPUTLESS = "CheckpointFunction.forward", "CheckpointWithoutOutput.checkpoint"
_FINISHED = "DistributedDataParallel.finish_grad_sync"
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_GATHER, _GATHERED = (f"_ParamAndGradBucketGroup.{name}" for name in ("start_param_sync", "finish_param_sync"))
_TENSOR_PARALLEL = tuple(f"megatron.core.tensor_parallel.{module}" for module in ("mappings", "layers"))
_ALL_GATHER, _REDUCE_SCATTER = "dist_all_gather_func", "dist_reduce_scatter_func"


class Listener(Protocol):
    """The object that the hooks call: ``ft.systems.dmr.runtime.engine.Engine``. ``is_active``: whether they call it
    now.
    """

    is_active: bool

    def follow(self, ways: Sequence[Sequence[int]]) -> None:
        """Note for each microbatch of this iteration the stages in the order in which it passes them, if not in that of
        their numbers.
        """

    def forward_step(
        self,
        step: Callable[[], Any],
        chunk: int,
        inputs: Any,
        outputs_of: Callable[[Any], Any],
        number: int | None = None,
    ) -> Any:
        """Run ``step``, core's forward pass of a microbatch on model chunk number ``chunk``, and return its result.

        Args:
            inputs: the activations that the chunk gets.
            outputs_of: returns the output activations, given the result of ``step``.
            number: number of the microbatch; None: the next one of the chunk.
        """

    def backward_step(self, step: Callable[[], Any], output: Any, gradients: Any) -> Any:
        """Run ``step``, the backward pass from ``output`` with the output's ``gradients``, and return its result."""

    def recomputed(self, function: Callable) -> Callable:
        """Return a replacement for ``function``, which activation checkpointing calls in the forward and in the
        backward.
        """

    def window(self, kind: str) -> None:
        """Begin a window: this rank is about to wait for communication between pipeline stages (``kind`` "p2p"), for
        the
        reduction of gradients ("dp") or for another collective ("tp").
        """

    def waited(self) -> None:
        """End the window: the communication is complete."""

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Begin a window whose duration varies between iterations, as with the all-to-all of MoE layers, until
        ``is_over``.
        """

    def communicates(
        self,
        kind: str,
        group: Any,
        outputs: Sequence[Any],
        source: Any,
        op: Any = None,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
        is_coalesced: bool = False,
    ) -> Any:
        """Note a collective that is about to begin.

        Args:
            kind: "all_reduce", "reduce_scatter", "all_gather" or "all_to_all".
            group: its process group.
            outputs: the tensors that receive the result.
            source: the tensor that this rank puts in.
            op: the operation of a reduction.
            splits: of an all-to-all: the sizes of the pieces of the output and of ``source``.
            is_coalesced: whether it begins later, together with others; ``completed`` reports their end.

        Returns:
            What ``communicated`` is called with when the collective is complete.
        """

    def communicated(self, begun: Any) -> None:
        """Note that a collective is complete. ``begun``: the object that ``communicates`` returned when it began."""

    def completed(self, tensors: Sequence[Any]) -> None:
        """Note that all collectives that write into the memory of ``tensors`` are complete."""

    def compiled(self, graph: Any, run: Callable[[list], Any], inputs: list) -> Any:
        """Execute a graph that ``torch.compile`` has compiled, and return its outputs.

        Args:
            graph: the compiled graph.
            run: executes the graph on a list of inputs, and empties the list.
            inputs: the inputs.
        """


_listener: Listener | None = None
_is_waiting = False


def listen(listener: Listener | None) -> None:
    """Make the hooks call ``listener`` from now on; None: the hooks do nothing."""
    global _listener
    _listener = listener


def follow(ways: Sequence[Sequence[int]]) -> None:
    """Announce the routes of the microbatches of an iteration that is about to begin; see :meth:`Listener.follow`."""
    listener = active()
    if listener is not None:
        listener.follow(ways)


def apply() -> None:
    replace(_SCHEDULES, "forward_step", _forward_step)
    replace(_SCHEDULES, "backward_step", _backward_step)
    replace(_P2P, "_batched_p2p_ops", _batched_p2p_ops)
    replace(_P2P, "_p2p_ops", _p2p_ops)
    replace(_RANDOM, _SEGMENT, staticmethod(_segment))
    replace(_RANDOM, _OUTPUTLESS, _outputless)
    replace(_PARALLEL, _FINISHED, _finish_grad_sync)
    replace(_BUFFER, _GATHER, _start_param_sync)
    replace(_BUFFER, _GATHERED, _finish_param_sync)
    for module in (*_TENSOR_PARALLEL, _BUFFER):
        replace(module, _ALL_GATHER, _all_gather_of(module))
        replace(module, _REDUCE_SCATTER, _reduce_scatter_of(module))
    replace("torch.distributed", "all_gather", _all_gather_list)
    replace("torch.distributed", "all_reduce", _all_reduce)
    replace("torch.distributed", "all_to_all_single", _all_to_all_single)


def active() -> Listener | None:
    """Return the listener, if it wants to be called now."""
    return _listener if _listener is not None and _listener.is_active else None


def _forward_step(
    forward_step_func,
    data_iterator,
    model,
    num_microbatches,
    input_tensor,
    forward_data_store,
    config,
    cp_group_size,
    collect_non_loss_data=False,
    checkpoint_activations_microbatch=None,
    is_first_microbatch=False,
    current_microbatch=None,
    vp_stage=None,
    is_last_stage=True,
):
    def step():
        return original(f"{_SCHEDULES}.forward_step")(
            forward_step_func,
            data_iterator,
            model,
            num_microbatches,
            input_tensor,
            forward_data_store,
            config,
            cp_group_size,
            collect_non_loss_data,
            checkpoint_activations_microbatch,
            is_first_microbatch,
            current_microbatch,
            vp_stage,
            is_last_stage,
        )

    listener = active()
    if listener is None:
        return step()
    return listener.forward_step(step, vp_stage or 0, input_tensor, _outputs, current_microbatch)


def _outputs(result: tuple) -> Any:
    return result[0]


def _backward_step(input_tensor, output_tensor, output_tensor_grad, *rest):
    def step():
        return original(f"{_SCHEDULES}.backward_step")(input_tensor, output_tensor, output_tensor_grad, *rest)

    listener = active()
    return step() if listener is None else listener.backward_step(step, output_tensor, output_tensor_grad)


def _batched_p2p_ops(**kwargs):
    return _on_its_way(original(f"{_P2P}._batched_p2p_ops")(**kwargs))


def _p2p_ops(**kwargs):
    return _on_its_way(original(f"{_P2P}._p2p_ops")(**kwargs))


def _on_its_way(requests: Any) -> Any:
    """Wrap p2p requests so that each wait for one is a window.

    The window does not begin when the communication starts, because core may compute between the start and the wait.
    """
    if active() is None:
        return requests
    if isinstance(requests, dict):
        return {name: _WindowedRequest(request) for name, request in requests.items()}
    return [_WindowedRequest(request) for request in requests]


def _segment(ctx, run_function, distribute_saved_activations, *args):
    """Replace the forward of ``CheckpointFunction``, which runs an activation-checkpointed function."""
    listener = active()
    function = run_function if listener is None else listener.recomputed(run_function)
    return original(f"{_RANDOM}.{_SEGMENT}")(ctx, function, distribute_saved_activations, *args)


def _outputless(self, run_function, *args):
    """Replace ``CheckpointWithoutOutput.checkpoint``: core discards the function's output and recomputes it later."""
    listener = active()
    function = run_function if listener is None else listener.recomputed(run_function)
    return original(f"{_RANDOM}.{_OUTPUTLESS}")(self, function, *args)


def _finish_grad_sync(self, force_all_reduce=False):
    listener = active()
    finish = original(f"{_PARALLEL}.{_FINISHED}")
    if listener is None:
        return finish(self, force_all_reduce=force_all_reduce)
    waits = any(group.grad_reduce_handle is not None for group in bucket_groups(self))
    with _window(lambda: listener.window("dp")) if waits else nullcontext():
        finish(self, force_all_reduce=force_all_reduce)
    listener.completed([bucket.grad_data for group in bucket_groups(self) for bucket in group.buckets])
    return None


def _start_param_sync(self, force_sync=False):
    original(f"{_BUFFER}.{_GATHER}")(self, force_sync=force_sync)
    _report_parameters(self)


def _finish_param_sync(self, skip_next_bucket_dispatch=False):
    original(f"{_BUFFER}.{_GATHERED}")(self, skip_next_bucket_dispatch=skip_next_bucket_dispatch)
    _report_parameters(self)


def _report_parameters(group: Any) -> None:
    """Report to the listener that the parameters of a bucket group are gathered, if no gather is still in flight."""
    listener = active()
    if listener is not None and group.param_gather_handle is None:
        listener.completed([bucket.param_data for bucket in group.buckets])


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    def call(is_async):
        return original("torch.distributed.all_reduce")(tensor, op, group, is_async)

    return _watched("all_reduce", call, [tensor], tensor, group, async_op, op=op)


def _all_gather_list(tensor_list, tensor, group=None, async_op=False):
    def call(is_async):
        return original("torch.distributed.all_gather")(tensor_list, tensor, group, is_async)

    return _watched("all_gather", call, tensor_list, tensor, group, async_op)


def _all_gather_of(module: str) -> Callable:
    """Return the replacement of the all-gather that a module of core has taken from torch."""

    def all_gather(output_tensor, input_tensor, group=None, async_op=False):
        def call(is_async):
            return original(f"{module}.{_ALL_GATHER}")(output_tensor, input_tensor, group=group, async_op=is_async)

        return _watched("all_gather", call, [output_tensor], input_tensor, group, async_op)

    return all_gather


def _reduce_scatter_of(module: str) -> Callable:
    """Return the replacement of the reduce-scatter that a module of core has taken from torch."""

    def reduce_scatter(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        def call(is_async):
            return original(f"{module}.{_REDUCE_SCATTER}")(output, input, op=op, group=group, async_op=is_async)

        return _watched("reduce_scatter", call, [output], input, group, async_op, op=op)

    return reduce_scatter


def _all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    def call(is_async):
        whole = (output, input, output_split_sizes, input_split_sizes, group, is_async)
        return original("torch.distributed.all_to_all_single")(*whole)

    listener = active()
    if listener is None:
        return call(async_op)
    members = dist.get_world_size(group)
    splits = tuple(
        [len(tensor) // members] * members if sizes is None or not len(sizes) else list(sizes)
        for sizes, tensor in ((output_split_sizes, output), (input_split_sizes, input))
    )
    return _watched("all_to_all", call, [output], input, group, async_op, splits=splits)


def _watched(
    kind: str,
    call: Callable[[bool], Any],
    outputs: Sequence[Any],
    source: Any,
    group: Any,
    async_op: bool,
    **details: Any,
) -> Any:
    """Run a collective, and report its beginning, its window and its end to the listener.

    Args:
        kind, outputs, source, details: as for ``Listener.communicates``.
        call: starts the collective, asynchronously if its argument is true, and returns its handle.
        group: the process group; None: of all ranks.
        async_op: whether the caller waits for the end itself.
    """
    listener = active()
    group = dist.group.WORLD if group is None else group
    if listener is None or dist.get_world_size(group) == 1:
        return call(async_op)
    is_coalesced = group in dist.distributed_c10d._world.pg_coalesce_state
    begun = listener.communicates(kind, group, outputs, source, is_coalesced=is_coalesced, **details)
    if is_coalesced:
        return call(async_op)
    work = call(True)
    if work is None:  # this rank is not in the group
        return None
    watched = _ReportingHandle(kind, work, lambda: listener.communicated(begun))
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


class _WindowedRequest:
    """A p2p request between pipeline stages. ``wait`` reports a window to the listener."""

    def __init__(self, request: Any):
        self._request = request

    def wait(self, *args: Any) -> Any:
        with _window(lambda: _listener.window("p2p")):
            return self._request.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _ReportingHandle:
    """The handle of a collective. ``wait`` reports a window, and calls the function ``ended`` once, after its end."""

    def __init__(self, kind: str, work: dist.Work, ended: Callable[[], None]):
        self._kind, self._work, self._ended = kind, work, ended

    def wait(self, *args: Any) -> bool:
        if self._ended is None:
            return self._work.wait(*args)
        with _window(self._opens):
            result = self._work.wait(*args)
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
        return result

    def _opens(self) -> None:
        if self._kind == "all_to_all":
            _listener.dynamic_window(self._work.is_completed)
        else:
            _listener.window("tp")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


__all__: Sequence[str] = ("Listener", "active", "apply", "follow", "listen")
