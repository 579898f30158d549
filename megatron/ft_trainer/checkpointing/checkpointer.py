"""The checkpointing interface of the trainer: save, load and close, called by the training loop."""

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import UserError
from ft.state.snapshot import optimizers
from megatron.core import parallel_state
from megatron.ft_trainer.agreement import from_rank_0, share
from megatron.ft_trainer.arguments.topics import CheckpointOptions
from megatron.ft_trainer.checkpointing import commit, content, inventory, rng, save
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.checkpointing.inventory import Manifest, bytes_in_words
from megatron.ft_trainer.checkpointing.load import Loader, LoadReport
from megatron.ft_trainer.checkpointing.save import Outcome

SLOWEST_WRITE = timedelta(hours=6)
"""Timeout of the group for checkpoints: a rank that has written its files waits there for the slowest one. A slow disk
is not a failure, and a dead rank is detected by others, so it is far longer than a write takes."""


class Checkpointer:
    """Saves and loads checkpoints.

    Create it on all ranks after megatron-core's process groups, and call every method on all ranks, in the same order.

    Args:
        options: checkpoint flags.
        layout: sizes of the parallel dimensions: ``world_size``, ``tp``, ``pp``, ``dp``, ``cp``, ``ep``, ...
        run_info: JSON values about the run to store in a checkpoint: ``model`` (the options that shape the model, with
            ``vocab_size``; compared on loading), ``options`` (all options, by group, for information) and
            ``fingerprints`` (of ``tokenizer``; compared on loading).
        log: prints a message; called on rank 0.
        observe: writes an event (:mod:`ft.base.events`) with its name and values; called on rank 0.

    Attributes:
        owes_a_save: whether a recovery has interrupted a save, so that the training loop has to save after the next
            step.
        last_outcome: result of the last save that has ended, None before.

    Raises:
        UserError: the folder of --save cannot be written, or another run saves into it.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        *,
        layout: Mapping[str, Any],
        run_info: Mapping[str, Any],
        log: Callable[[str], None] = print,
        observe: Callable[..., None] = lambda name, **values: None,
    ):
        self._options, self._layout, self._run, self._log, self._observe = options, layout, run_info, log, observe
        self._group = dist.new_group(backend="gloo", timeout=SLOWEST_WRITE) if options.save or options.load else None
        self._distrusted: set[str] = set()
        self._kept_step: int | None = None
        self.owes_a_save = self._is_saving = False
        self.last_outcome: Outcome | None = None
        self._folder = Path(options.save) if options.save else None
        if self._folder is not None:
            from_rank_0(self._take_folder, self._group)

    def save(self, state: TrainState, model: list, optimizer: Any, scheduler: Any, *, is_last: bool = False) -> bool:
        """Save the state after ``state.step`` steps.

        A save that fails (full disk, ...) is logged and has no other effect: training continues, and older checkpoints
        stay. ``is_last``: the run ends with this step.

        Returns:
            True: the checkpoint is complete. False: it failed, or there is no --save.
        """
        if self._folder is None:
            return False
        self.owes_a_save = False
        if self._kept_step == state.step:
            return True
        self._is_saving = True
        kind = content.optimizer_kind(optimizer, self._options.dist_ckpt_optim_fully_reshardable)
        outcome = save.save(
            self._folder,
            content.to_save(
                state,
                model,
                optimizer,
                scheduler,
                kind=kind,
                optimizer_steps=max(share(0 if kind is None else optimizers.steps(optimizer), self._group)),
                run=self._run,
                layout=self._layout,
            ),
            self._manifest(state.step, kind),
            self._group,
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            keep_last=self._options.keep_last,
            distrusted=self._distrusted,
        )
        self._is_saving = False
        return self._conclude(outcome, is_last)

    def unsaved(self, step: int) -> str:
        """Return why the last save, of ``step``, has failed; "" if it has not."""
        last = self.last_outcome
        return "" if last is None or last.step != step or self._kept_step == step else last.error or ""

    def load(self, state: TrainState, model: list, optimizer: Any, scheduler: Any, seed: int) -> LoadReport | None:
        """Load the newest checkpoint that passes verification, or the one of --ckpt-step, into the given objects.

        Args:
            state: receives the position of the run.
            model: model chunks.
            optimizer: the optimizer; None: its state is not loaded.
            scheduler: the learning-rate schedule, or None.
            seed: the run's seed. If the saved states of the random generators belong to another layout, the generators
                are reseeded from the seed and the step.

        Returns:
            A report of what was loaded; None without --load, or if the folder contains no checkpoint.

        Raises:
            NoUsableCheckpoint: there are checkpoints, but all are broken; or the one of --ckpt-step is not usable.
            UserError: the folder cannot be read, is empty under --exit-on-missing-checkpoint, or the checkpoint belongs
                to another model, tokenizer or kind of optimizer.
        """
        if not self._options.load:
            return None
        loader = Loader(
            Path(self._options.load),
            self._group,
            self._options,
            self._run,
            self._distrusted,
            self._log,
        )
        report = loader.load(state, model, optimizer, scheduler, seed)
        if report is not None and not self._options.finetune and self._saves_into(report.path.parent):
            self._kept_step = report.step
        return report

    def has_own(self) -> bool:
        """Return whether the folder of --save holds a complete checkpoint.

        Rank 0 decides, because a file system may show a new checkpoint to some ranks earlier than to others. All ranks
        have to call it.

        Raises:
            UserError: rank 0 cannot read the folder.
        """

        def look() -> bool:
            try:
                return inventory.newest_complete(inventory.scan(self._folder, may_be_missing=True)) is not None
            except OSError as error:
                problem = f"--save: {error.filename or self._folder}: {error.strerror}"
                raise UserError(problem, "give a folder that this user can read") from error

        return self._folder is not None and from_rank_0(look, self._group)

    def rejoin(self) -> None:
        """Agree again with the other ranks on what is saved. Call it after a recovery, on all ranks.

        A save that the recovery has interrupted is repeated at the end of the next step (``owes_a_save``).
        """
        if self._group is None:
            return
        mine = [self._kept_step, self.owes_a_save or self._is_saving, sorted(self._distrusted)]
        said, self._is_saving = share(mine, self._group), False
        self._kept_step = max((kept for kept, _, _ in said if kept is not None), default=None)
        self.owes_a_save = any(owes for _, owes, _ in said)
        self._distrusted.update(*(names for _, _, names in said))

    def close(self) -> None:
        """Release the process group, unless torch.distributed was shut down already."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = self._folder = None

    def _conclude(self, outcome: Outcome, is_last: bool) -> bool:
        self.last_outcome = outcome
        if outcome.error is None:
            self._kept_step = outcome.step
        if dist.get_rank() == 0:
            for note in outcome.notes:
                self._log(f"checkpoint: {note}")
            self._log(_message(outcome, is_last))
            place = {"step": outcome.step, "folder": str(outcome.folder)}
            if outcome.error is None:
                self._observe(events.SAVED, **place, bytes=outcome.bytes, seconds=outcome.seconds)
            else:
                self._observe(events.SAVE_FAILED, **place, reason=outcome.error)
        return outcome.error is None

    def _manifest(self, step: int, kind: str | None) -> Manifest:
        """Return the manifest of a save, except its serial number and its files."""
        return Manifest(
            step=step,
            serial=0,
            saved_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            layout=dict(self._layout),
            versions={"megatron-core": version("megatron-core"), "torch": str(torch.__version__)},
            optimizer=kind,
            rng_grid=rng.grid()[0],
            run=dict(self._run),
        )

    def _take_folder(self) -> None:
        commit.check_writable(self._folder)
        commit.occupy(self._folder, os.environ)

    def _saves_into(self, folder: Path) -> bool:
        return self._folder is not None and self._folder.resolve() == folder.resolve()


def _message(outcome: Outcome, is_last: bool) -> str:
    if outcome.error is not None:
        goes_on = "the run ends without it" if is_last else "training goes on"
        return (
            f"checkpoint: saving step {outcome.step} FAILED: {outcome.error}\n"
            f"  {goes_on}; older checkpoints in {outcome.folder} are as they were"
        )
    size = bytes_in_words(outcome.bytes)
    return f"checkpoint: step {outcome.step} saved to {outcome.folder} ({size}, {outcome.seconds:.1f} s)"
