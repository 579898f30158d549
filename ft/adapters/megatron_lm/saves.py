"""Asynchronous saves of a checkout, and the checkpoints in its folder."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ft.adapters.megatron_lm import tree
from ft.base import events
from ft.base.errors import FtError, LastSaveFailed
from ft.faults.verdict import RETRY, of_error

if TYPE_CHECKING:
    from ft.adapters.megatron_lm.state import Run

TRACKER = "latest_checkpointed_iteration.txt"
_REASON_LIMIT = 2000
"""Longest text of an error in an event, in characters."""


def finish() -> None:
    """Wait until all asynchronous saves that were started are complete. All ranks have to call it."""
    async_utils = tree.module("async_utils")
    if not async_utils.is_empty_async_queue():
        async_utils._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=False)


@contextlib.contextmanager
def reported(run: "Run", step: int, is_last: bool) -> Iterator[None]:
    """Write an event about the save of ``step`` that happens inside: rank 0 if it succeeds, any rank on which it fails.

    Raises:
        LastSaveFailed: the save has failed, and the run ends after it (``is_last``). The other ranks may wait for this
            one in the save, so the run cannot go on.
    """

    def observe(name: str, **values: str) -> None:
        if run.session is not None:
            run.session.observe(name, step=step, folder=str(run.args.save), **values)

    try:
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


def signal_of(run: "Run") -> str:
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


def save(run: "Run") -> None:
    """Save the last checkpoint of the run, and return when it is complete. All ranks have to call it.

    Raises:
        LastSaveFailed: see :func:`reported`.
    """
    common = tree.module("training").preprocess_common_state_dict
    state = run.chunks, run.optimizer, run.scheduler, run.flops, run.checkpointing_context
    with reported(run, run.step, is_last=True):
        tree.module("checkpointing").save_checkpoint(run.step, *state, preprocess_common_state_dict_fn=common)
        if run.args.async_save:
            finish()


def load(run: "Run") -> bool:
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
    run.step, run.flops, run.sums = own.iteration, own.num_floating_point_operations_so_far, {}
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
