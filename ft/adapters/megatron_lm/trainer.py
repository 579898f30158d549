"""A checkout's trainer as :mod:`ft.protection.contract` sees it: its position, its checkpoints and asynchronous saves.

The position is all state except model and optimizer that changes from step to step.
"""

import contextlib
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ft.adapters.megatron_lm import state, step, tree
from ft.adapters.megatron_lm.state import CheckoutRun
from ft.base import events
from ft.base.errors import FtError, LastSaveFailed
from ft.faults.verdict import RETRY, of_error
from ft.state.snapshot import optimizers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
CHOICES = ("do_train", "do_valid", "do_test")
"""Arguments of the checkout that it sets itself: what has been consumed, and which data there are."""

_PLAIN = ("step", "first_step", "flops", "samples", "earlier_samples", "reports_memory", "sums", "counts", "exit_code")


class CheckoutPosition:
    """Reads and writes the position; see :class:`ft.protection.position.Position`."""

    def __init__(self, run: CheckoutRun):
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
        _reset_counts(run)
        _reset_loggers()
        run.iterators.move()
        if run.running_timers is not None:
            return
        run.is_moved = True
        run.is_entered, run.live_sums = False, None
        _reset_batch_size(run)
        _reset_model(run)
        _forget_saves(run)
        run.log.rewind(run.step)


def _reset_batch_size(run: CheckoutRun) -> None:
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


def _reset_rerun_machine(run: CheckoutRun, large_values: list[dict[str, Any]]) -> None:
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


_TOKENS, _HAS_TOKENS = "_seqlen_stats_in_iteration", "_seqlen_stats_active"
_PREDICTIONS = ("cumulative_correct_values", "cumulative_total_values")


def counts() -> dict[str, Any]:
    """Return the trainer's counts that go on from one step to the next, encoded as JSON values.

    They are the tokens of packed sequences, because the trainer adds those of an evaluation to the next step, and with
    --mtp-num-layers the numbers of all predictions and of the right ones.
    """
    training, tracker = tree.module("training"), MTPLossLoggingHelper.tracker
    found = {name: tracker[name] for name in _PREDICTIONS if name in tracker}
    if getattr(training, _HAS_TOKENS, False):
        found[_TOKENS] = getattr(training, _TOKENS)
    return state.encode(found)


def _reset_counts(run: CheckoutRun) -> None:
    training, tracker = tree.module("training"), MTPLossLoggingHelper.tracker
    found = state.decode(run.counts, run.device)
    if hasattr(training, _HAS_TOKENS):  # from 0.19 on
        setattr(training, _HAS_TOKENS, _TOKENS in found)
        setattr(training, _TOKENS, found.pop(_TOKENS, None))
    for name in _PREDICTIONS:
        tracker.pop(name, None)
    tracker.update(found)


_REMOVERS = {"activation_logging": ("remove_activation_hooks", "remove_tpe_hooks"), "dgrad_logging": ("remove_hooks",)}
"""Module of the trainer -> methods of its logger that remove the hooks with which the logger records a step."""


def _reset_loggers() -> None:
    """Remove the hooks that record activations, gradients and tokens per expert, and discard what they have recorded.

    The trainer removes them at the end of the passes. After an interrupted step it would find them, and fail
    (--save-activations-interval, --save-dgrads-interval, --save-tokens-per-expert-interval).
    """
    for name, removers in _REMOVERS.items():
        module = sys.modules.get(f"megatron.training.{name}")
        logger = getattr(module, "_LOGGER", None)
        if logger is not None:
            for remover in removers:
                getattr(logger, remover)()
            module._LOGGER = None


def _reset_model(run: CheckoutRun) -> None:
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


def _forget_saves(run: CheckoutRun) -> None:
    """Discard saves under way, and what earlier saves have cached about other ranks, because some ranks have new
    workers.
    """
    run.checkpointing_context.clear()
    if run.args.async_save:
        abandon()


_STEP_SEEDS = 1_000_003
"""What a step's number is multiplied by in a seed, so that the seeds of steps and ranks differ."""


class CheckoutTrainer:
    """Provides the parts of a :class:`CheckoutRun` through the interface that :mod:`ft.protection.contract`
    documents."""

    def __init__(self, run: CheckoutRun):
        self._run, self.position, self.extra = run, CheckoutPosition(run), run.extra
        self.chunks, self.optimizer, self.scheduler = run.chunks, run.optimizer, run.scheduler
        self.loaders = run.iterators.loaders  # only in a run whose training data are divided
        args = run.args
        self.seed, self.clip_grad, self.draws_apart = args.seed, args.clip_grad, args.data_parallel_random_init
        self.steps, self.batch = args.train_iters, args.global_batch_size
        self.saves = args.save is not None
        self.save_interval = args.save_interval if self.saves else None

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
        return newest(self._run.args.save)

    def is_saved(self, step: int) -> bool:
        found = self.newest_checkpoint()
        return found is not None and found.name == f"iter_{step:07d}"

    def load(self) -> bool:
        is_loaded = load(self._run)
        if is_loaded:
            self.position.set(self.position.get())
        return is_loaded

    def save(self) -> None:
        save(self._run)

    def rewind(self) -> None:
        self._run.log.rewind(self.step)

    def end(self, reason: str) -> None:
        self._run.is_ended = True
        if dist.get_rank() == 0:
            print(f"the run ends after step {self.step + 1}: {reason}", flush=True)


TRACKER = "latest_checkpointed_iteration.txt"
_REASON_LIMIT = 2000
"""Longest text of an error in an event, in characters."""


def finish() -> None:
    """Wait until all asynchronous saves that were started are complete. All ranks have to call it."""
    async_utils = tree.module("async_utils")
    if not async_utils.is_empty_async_queue():
        async_utils._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=False)


@contextlib.contextmanager
def reported(run: CheckoutRun, step: int, is_last: bool) -> Iterator[None]:
    """Write an event about the save of ``step`` that happens inside: rank 0 if it succeeds, any rank on which it fails.

    All ranks that save have to call it. Meanwhile all parameters count the same optimizer steps, those of a rebuilt
    stage, too, because a checkpoint has one count.

    Raises:
        LastSaveFailed: the save has failed, and the run ends after it (``is_last``). The other ranks may wait for this
            one in the save, so the run cannot go on.
    """

    def observe(name: str, **values: str) -> None:
        if run.session is not None:
            run.session.observe(name, step=step, folder=str(run.args.save), **values)

    try:
        counted = torch.tensor(optimizers.steps(run.optimizer), device=run.device)
        dist.all_reduce(counted, dist.ReduceOp.MAX)
        with optimizers.counted_alike(run.optimizer, int(counted)):
            yield
    except FtError:  # of a protection: the save is interrupted
        raise
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        reason = f"{type(error).__name__}: {error}"[:_REASON_LIMIT]
        observe(events.SAVE_FAILED, reason=reason)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if is_last and of_error(kinds, str(error)).action != RETRY:  # a lost connection is recovered from
            raise LastSaveFailed(f"the checkpoint of step {step}, the last one, cannot be saved: {reason}") from error
        raise
    if dist.get_rank() == 0:
        observe(events.SAVED)


def signal_of(run: CheckoutRun) -> str:
    """Return the name of the exit signal that this rank has received, "" if none (--exit-signal-handler)."""
    if not run.args.exit_signal_handler:
        return ""
    handler = tree.module("global_vars").get_signal_handler()
    return signal.Signals(handler.sig).name if handler._signal_received else ""


def abandon() -> None:
    """Stop the asynchronous saves under way. Their step is not committed yet; when it is repeated, it saves again."""
    async_utils = tree.module("async_utils")
    queue = async_utils._async_calls_queue
    while queue.async_calls:
        process = getattr(queue.async_calls.popleft().async_caller, "process", None)
        if process is not None:
            process.kill()
            process.join()


def save(run: CheckoutRun) -> None:
    """Save the final checkpoint of the run, and wait until it is complete. Every rank has to call this function.

    Raises:
        LastSaveFailed: see :func:`reported`.
    """
    common = tree.module("training").preprocess_common_state_dict
    state = run.chunks, run.optimizer, run.scheduler, run.flops, run.checkpointing_context
    with reported(run, run.step, is_last=True):
        tree.module("checkpointing").save_checkpoint(run.step, *state, preprocess_common_state_dict_fn=common)
        if run.args.async_save:
            finish()


def load(run: CheckoutRun) -> bool:
    """Load the newest checkpoint of the run or, if it has none yet, the one that it began with. All ranks have to call
    it.

    The counters of ``run`` are set to the checkpoint's, and the layers' values in ``run.extra``.

    Returns:
        Whether there is a checkpoint.
    """
    own, checkpointing = run.args, tree.module("checkpointing")
    if newest(own.save) is not None:
        own.load, own.ckpt_step, own.pretrained_checkpoint = own.save, None, None
        own.finetune = own.no_load_optim = own.no_load_rng = False
    if not any(folder and checkpointing.checkpoint_exists(folder) for folder in (own.load, own.pretrained_checkpoint)):
        return False
    if run.step > 0 and (own.finetune or own.no_load_optim or own.no_load_rng):
        return False  # it would keep a part of the present state: only a new process begins from such a checkpoint
    context = run.checkpointing_context
    own.iteration, own.num_floating_point_operations_so_far = checkpointing.load_checkpoint(
        run.chunks, run.optimizer, run.scheduler, checkpointing_context=context
    )
    run.step, run.flops, run.sums, run.counts = own.iteration, own.num_floating_point_operations_so_far, {}, {}
    run.samples = run.earlier_samples = own.consumed_train_samples
    return True


def newest(folder: str | None) -> Path | None:
    """Return the newest checkpoint that the tracker file in ``folder`` names; None if there is none."""
    if folder is None:
        return None
    try:
        step = int((Path(folder) / TRACKER).read_text())
    except (OSError, ValueError):
        return None
    found = Path(folder) / f"iter_{step:07d}"
    return found if found.is_dir() else None
