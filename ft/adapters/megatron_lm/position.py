"""The position of a checkout's trainer: all state except model and optimizer that changes from step to step."""

from typing import Any

from ft.adapters.megatron_lm import saves, tree
from ft.adapters.megatron_lm.state import Run

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
CHOICES = ("do_train", "do_valid", "do_test")
"""Arguments of the checkout that it sets itself: what has been consumed, and which data there are."""

_PLAIN = ("step", "first_step", "flops", "samples", "earlier_samples", "reports_memory", "sums", "exit_code")


class CheckoutPosition:
    """Reads and writes the position; see :class:`ft.protection.position.Position`."""

    def __init__(self, run: Run):
        self._run = run

    def get(self) -> dict[str, Any]:
        run = self._run
        args = {name: getattr(run.args, name) for name in (*COUNTERS, *CHOICES)}
        own = {name: getattr(run, name) for name in _PLAIN}
        return {**own, "args": args, "large_values": _large_values(), "extra": dict(run.extra)}

    def set(self, position: dict[str, Any]) -> None:
        """Move the trainer to ``position``. All ranks have to call it.

        If the call is made inside a step, the step is repeated. Otherwise the trainer's loop is started again.
        """
        run = self._run
        for name in _PLAIN:
            setattr(run, name, position[name])
        run.extra.clear()
        run.extra.update(position["extra"])
        for name, value in position["args"].items():
            setattr(run.args, name, value)
        run.args.iteration, run.args.curr_iteration = run.step, run.step
        run.args.num_floating_point_operations_so_far = run.flops
        _reset_timers(run.running_timers or {})
        _reset_rerun_machine(run, position["large_values"])
        run.iterators.move()
        if run.running_timers is not None:
            return
        run.is_moved = True
        run.is_entered, run.live_sums = False, None
        _reset_batch_size(run)
        _reset_model(run)
        _forget_saves(run)
        run.log.rewind(run.step)


def _reset_batch_size(run: Run) -> None:
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    update_num_microbatches(run.earlier_samples, consistency_check=False)


def _reset_timers(running: dict[str, tuple[float, float]]) -> None:
    """Stop and clear all timers but those in ``running``, which were running at the beginning of the step.

    What has abandoned the step may have stopped these, too, and the trainer divides by the time that they show.
    """
    for name, timer in tree.module("global_vars").get_timers()._timers.items():
        timer._started = False
        timer.reset()
        if name in running:
            timer._started, (timer._start_time, timer._elapsed) = True, running[name]


def _rerun_machine() -> Any:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    return get_rerun_state_machine()


def _large_values() -> list[dict[str, Any]]:
    machine = _rerun_machine()
    return [dict(machine.large_value_counts), dict(machine.max_values)]


def _reset_rerun_machine(run: Run, large_values: list[dict[str, Any]]) -> None:
    """Set megatron-core's rerun state machine, which repeats suspicious steps, to its state before a step.

    The machine may be inside a step, or an evaluation may have disabled it.
    """
    from megatron.core.rerun_state_machine import RerunMode

    machine = _rerun_machine()
    new = type(machine)(
        state_save_func=machine.state_save_func,
        state_restore_func=machine.state_restore_func,
        mode=RerunMode(run.args.rerun_mode),
        error_injector=machine.error_injector,
        result_rejected_tracker_filename=machine.result_rejected_tracker_filename,
    )
    new.current_iteration = run.step
    new.large_value_counts, new.max_values = dict(large_values[0]), dict(large_values[1])
    vars(machine).update(vars(new))


def _reset_model(run: Run) -> None:
    """Set the model chunks and their configuration to the state that the trainer's loop expects at its start."""
    config = run.config
    config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
    overlaps = run.args.overlap_param_gather and run.args.use_distributed_optimizer
    for chunk in run.chunks:
        chunk.train()
        if hasattr(chunk, "force_all_reduce"):
            chunk.force_all_reduce = False
        if overlaps and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def _forget_saves(run: Run) -> None:
    """Discard saves under way, and what earlier saves have cached about other ranks, because some ranks have new
    workers.
    """
    run.checkpointing_context.clear()
    if run.args.async_save:
        saves.abandon()
