"""The position of a checkout's trainer: all state except model and optimizer that changes from step to step."""

import random
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ft.adapters.megatron_lm import saves, step, tree
from ft.adapters.megatron_lm.iterators import StreamLoader
from ft.adapters.megatron_lm.state import Run
from megatron.core import parallel_state, tensor_parallel

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


_STEP_SEEDS = 1_000_003
"""What a step's number is multiplied by in a seed, so that the seeds of steps and ranks differ."""


class CheckoutTrainer:
    """Provides the parts of a :class:`Run` through the interface that :mod:`ft.protection.contract` documents."""

    def __init__(self, run: Run):
        self._run, self.position = run, CheckoutPosition(run)
        args = run.args
        self.seed, self.clip_grad, self.draws_apart = args.seed, args.clip_grad, args.data_parallel_random_init
        self.steps, self.batch = args.train_iters, args.global_batch_size
        self.saves = args.save is not None
        self.save_interval = args.save_interval if self.saves else None

    @property
    def chunks(self) -> list:
        return self._run.chunks

    @property
    def optimizer(self) -> Any:
        return self._run.optimizer

    @property
    def scheduler(self) -> Any:
        return self._run.scheduler

    @property
    def loaders(self) -> list[StreamLoader]:  # only in a run whose training data are divided
        return self._run.iterators.loaders

    @property
    def extra(self) -> dict[str, Any]:
        return self._run.extra

    @property
    def step(self) -> int:  # committed steps
        return self._run.step

    @property
    def samples(self) -> int:
        return self._run.args.consumed_train_samples

    @property
    def batch_now(self) -> int:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size

        return get_current_global_batch_size()

    def microbatches(self, samples: int) -> int:
        return samples // (self._run.args.micro_batch_size * self._run.args.data_parallel_size)

    def fingerprint(self) -> dict[str, str | int]:
        return step.fingerprint(self._run)

    def reseed(self, step: int) -> None:
        args = self._run.args
        seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank() + _STEP_SEEDS * step
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, args.te_rng_tracker, args.inference_rng_tracker)

    def rehearse(self, samples: int) -> None:
        step.rehearse(self._run, samples)

    def newest_checkpoint(self) -> Path | None:
        return saves.newest(self._run.args.save)

    def is_saved(self, step: int) -> bool:
        found = self.newest_checkpoint()
        return found is not None and found.name == f"iter_{step:07d}"

    def load(self) -> bool:
        is_loaded = saves.load(self._run)
        if is_loaded:
            self.position.set(self.position.get())
        return is_loaded

    def save(self) -> None:
        saves.save(self._run)

    def rewind(self) -> None:
        self._run.log.rewind(self.step)

    def end(self, reason: str) -> None:
        self._run.is_ended = True
        if dist.get_rank() == 0:
            print(f"the run ends after step {self.step + 1}: {reason}", flush=True)
