"""Hooks in core for DMR (SpareTrain): positions in the schedule, recomputations, and communication windows.

Without a ``Listener``, core behaves as before.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from megatron.patches.replace import original, replace
from megatron.patches.step_state import bucket_groups

_SCHEDULES, _P2P = "megatron.core.pipeline_parallel.schedules", "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM, _PARALLEL = "megatron.core.tensor_parallel.random", "megatron.core.distributed.distributed_data_parallel"
_SEGMENT, _OUTPUTLESS = "CheckpointFunction.forward", "CheckpointWithoutOutput.checkpoint"
_FINISHED = "DistributedDataParallel.finish_grad_sync"


class Listener(Protocol):
    """The object that the hooks call: ``ft.systems.dmr.runtime.engine.Engine``."""

    is_active: bool

    def forward_step(self, step: Callable[[], Any], chunk: int, inputs: Any, outputs_of: Callable[[Any], Any]) -> Any:
        """Run ``step``, the forward of a chunk's next microbatch."""

    def backward_step(self, step: Callable[[], Any], output: Any, gradients: Any) -> Any:
        """Run ``step``, the backward from ``output``."""

    def recomputed(self, function: Callable) -> Callable:
        """Return a replacement for ``function``, which is called now and again in a backward pass."""

    def window(self, kind: str) -> None:
        """Note that communication is under way and will be waited for next.

        ``kind``: one of the kinds in ``ft.systems.dmr.plan.trace``.
        """

    def waited(self) -> None:
        """Note that the wait has ended."""

    def dynamic_window(self, is_over: Callable[[], bool]) -> None:
        """Note that communication is under way whose duration varies between iterations."""

    def reduced(self, group: Any, tensor: Any, *, is_over: bool) -> None:
        """Note that ``tensor`` is the result of an all-reduce, ended now or ending before the optimizer step."""


_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Make the hooks call ``listener`` from now on."""
    global _listener
    _listener = listener


def apply() -> None:
    replace(_SCHEDULES, "forward_step", _forward_step)
    replace(_SCHEDULES, "backward_step", _backward_step)
    replace(_P2P, "_batched_p2p_ops", _batched_p2p_ops)
    replace(_P2P, "_p2p_ops", _p2p_ops)
    replace(_RANDOM, _SEGMENT, staticmethod(_segment))
    replace(_RANDOM, _OUTPUTLESS, _outputless)
    replace(_PARALLEL, _FINISHED, _finish_grad_sync)
    replace("torch.distributed", "all_reduce", _all_reduce)
    replace("torch.distributed", "all_to_all_single", _all_to_all_single)


def _active() -> Listener | None:
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

    listener = _active()
    return step() if listener is None else listener.forward_step(step, vp_stage or 0, input_tensor, _outputs)


def _outputs(result: tuple) -> Any:
    return result[0]


def _backward_step(input_tensor, output_tensor, output_tensor_grad, *rest):
    def step():
        return original(f"{_SCHEDULES}.backward_step")(input_tensor, output_tensor, output_tensor_grad, *rest)

    listener = _active()
    return step() if listener is None else listener.backward_step(step, output_tensor, output_tensor_grad)


def _batched_p2p_ops(**kwargs):
    return _on_its_way(original(f"{_P2P}._batched_p2p_ops")(**kwargs))


def _p2p_ops(**kwargs):
    return _on_its_way(original(f"{_P2P}._p2p_ops")(**kwargs))


def _on_its_way(requests: Any) -> Any:
    """Return requests whose waits are windows: between starting and waiting for them, core may compute."""
    if _active() is None:
        return requests
    if isinstance(requests, dict):
        return {name: _Awaited(request) for name, request in requests.items()}
    return [_Awaited(request) for request in requests]


def _segment(ctx, run_function, distribute_saved_activations, *args):
    listener = _active()
    function = run_function if listener is None else listener.recomputed(run_function)
    return original(f"{_RANDOM}.{_SEGMENT}")(ctx, function, distribute_saved_activations, *args)


def _outputless(self, run_function, *args):
    listener = _active()
    function = run_function if listener is None else listener.recomputed(run_function)
    return original(f"{_RANDOM}.{_OUTPUTLESS}")(self, function, *args)


def _finish_grad_sync(self, force_all_reduce=False):
    listener = _active()
    finish = original(f"{_PARALLEL}.{_FINISHED}")
    if listener is None or all(group.grad_reduce_handle is None for group in bucket_groups(self)):
        return finish(self, force_all_reduce=force_all_reduce)
    listener.window("dp")
    finish(self, force_all_reduce=force_all_reduce)
    listener.waited()
    return None


def _all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    call, listener = original("torch.distributed.all_reduce"), _active()
    if listener is None:
        return call(tensor, op, group, async_op)
    group = dist.group.WORLD if group is None else group
    if dist.get_world_size(group) == 1:
        return call(tensor, op, group, async_op)
    if group in dist.distributed_c10d._world.pg_coalesce_state:
        work = call(tensor, op, group, async_op)
        listener.reduced(group, tensor, is_over=False)
        return work
    work = call(tensor, op, group, True)
    if work is None:  # this rank is not in the group
        return None
    watched = _Watched(work, lambda: listener.reduced(group, tensor, is_over=True))
    if async_op:
        return watched
    listener.window("tp")
    watched.wait()
    listener.waited()
    return None


def _all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
    call, listener = original("torch.distributed.all_to_all_single"), _active()
    splits = (output_split_sizes, input_split_sizes, group)
    if listener is None or async_op:
        return call(output, input, *splits, async_op)
    work = call(output, input, *splits, True)
    if work is not None:
        listener.dynamic_window(work.is_completed)
        work.wait()
        listener.waited()
    return None


class _Awaited:
    """A request of a message between stages, whose wait is a window."""

    def __init__(self, request: Any):
        self._request = request

    def wait(self, *args: Any) -> Any:
        listener = _active()
        if listener is None:
            return self._request.wait(*args)
        listener.window("p2p")
        result = self._request.wait(*args)
        listener.waited()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Watched:
    """A reduction that calls a function at its end."""

    def __init__(self, work: dist.Work, ended: Callable[[], None]):
        self._work, self._ended = work, ended

    def wait(self, *args: Any) -> bool:
        result = self._work.wait(*args)
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


__all__: Sequence[str] = ("Listener", "apply", "listen")
