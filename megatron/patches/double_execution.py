"""Hooks in megatron-core (core) and torch.distributed that drive DMR (dual modular redundancy, SpareTrain).

DMR executes every operator of a training step twice and compares the results, to catch silent data corruption. The
hooks call a ``Listener``, DMR's engine, at each forward and backward pass of a microbatch, for each function that
activation checkpointing recomputes, and at communication windows: a window is the time in which this rank waits for
communication, so that the engine can execute operators a second time without slowing down training. Without an active
``Listener``, core behaves as before.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch.distributed as dist

from megatron.patches.replace import wrap
from megatron.patches.step_state import bucket_groups

_CORE = "megatron.core."
_SCHEDULES, _P2P = f"{_CORE}pipeline_parallel.schedules", f"{_CORE}pipeline_parallel.p2p_communication"
_RANDOM, _PARALLEL = f"{_CORE}tensor_parallel.random", f"{_CORE}distributed.distributed_data_parallel"
_BUFFER = f"{_CORE}distributed.param_and_grad_buffer"
_WITH_COLLECTIVES = (f"{_CORE}tensor_parallel.mappings", f"{_CORE}tensor_parallel.layers", _BUFFER)


class Listener(Protocol):
    """The object that the hooks call: ``ft.systems.dmr.runtime.engine.Engine``.

    Attributes:
        is_active: whether the hooks call it now.
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
        """Return a replacement for ``function``, which activation checkpointing calls in both passes."""

    def window(self, kind: str) -> None:
        """Begin a window: this rank is about to wait for communication.

        Args:
            kind: "p2p" between pipeline stages, "dp" the reduction of gradients, "tp" another collective.
        """

    def waited(self) -> None:
        """End the window: the communication is complete."""

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Begin a window whose duration varies between iterations, as with the all-to-all of MoE layers.

        Args:
            is_over: returns whether the window has ended.
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
    wrap(_SCHEDULES, "forward_step", _forward_step)
    wrap(_SCHEDULES, "backward_step", _backward_step)
    wrap(_P2P, "_batched_p2p_ops", _on_its_way)
    wrap(_P2P, "_p2p_ops", _on_its_way)
    wrap(_RANDOM, "CheckpointFunction.forward", _recomputed, static=True)
    wrap(_RANDOM, "CheckpointWithoutOutput.checkpoint", _recomputed)
    wrap(_PARALLEL, "DistributedDataParallel.finish_grad_sync", _finish_grad_sync)
    wrap(_BUFFER, "_ParamAndGradBucketGroup.start_param_sync", _param_sync)
    wrap(_BUFFER, "_ParamAndGradBucketGroup.finish_param_sync", _param_sync)
    for module in _WITH_COLLECTIVES:
        wrap(module, "dist_all_gather_func", _all_gather)
        wrap(module, "dist_reduce_scatter_func", _reduce_scatter)
    wrap("torch.distributed", "all_gather", _all_gather_list)
    wrap("torch.distributed", "all_reduce", _all_reduce)
    wrap("torch.distributed", "all_to_all_single", _all_to_all_single)


def active() -> Listener | None:
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
    requests = run(**kwargs)
    if active() is None:
        return requests
    if isinstance(requests, dict):
        return {name: _WindowedRequest(request) for name, request in requests.items()}
    return [_WindowedRequest(request) for request in requests]


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
        kind, outputs, source, details: as for ``Listener.communicates``.
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
