"""The checkpointing interface of the trainer: save, finalize, load and close, called by the training loop."""

import os
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft.base import events
from ft.base.errors import UserError
from megatron.core import parallel_state
from megatron.ft_trainer.arguments.topics import CheckpointOptions
from megatron.ft_trainer.checkpointing import commit, content, inventory, optimizer_state, rng
from megatron.ft_trainer.checkpointing.channel import Channel, Progress
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.checkpointing.inventory import Manifest
from megatron.ft_trainer.checkpointing.load import Loader, LoadReport
from megatron.ft_trainer.checkpointing.plan import SavePlanning
from megatron.ft_trainer.checkpointing.save import Outcome, Saver
from megatron.ft_trainer.checkpointing.writer import bytes_in_words


class Checkpointer:
    """Saves and loads checkpoints. At most one save is in progress at a time.

    Create it on all ranks after megatron-core's process groups, and call every method on all ranks, in the same order.

    Args:
        options: checkpoint flags.
        layout: sizes of the parallel dimensions: ``world_size``, ``tp``, ``pp``, ``dp``, ``cp``, ``ep``, ...
        run_info: JSON values about the run to store in a checkpoint: ``model`` (the options that shape the model, with
            ``vocab_size``; compared on loading), ``options`` (all options, by group, for information) and
            ``fingerprints`` (of ``tokenizer`` and ``data``; compared on loading).
        data_parallel_random_init: whether each data-parallel rank has its own states of the random generators.
        log: prints a message; called on rank 0.
        observe: writes an event (:mod:`ft.base.events`) with its name and values; called on rank 0.

    Attributes:
        owes_a_save: whether a recovery has abandoned a save, so that the training loop has to save after the next step.
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
        data_parallel_random_init: bool = False,
        log: Callable[[str], None] = print,
        observe: Callable[..., None] = lambda name, **values: None,
    ):
        self._options, self._layout, self._run, self._log, self._observe = options, layout, run_info, log, observe
        self._random_init = data_parallel_random_init
        self._channel = Channel() if options.save or options.load else None
        self._distrusted: set[str] = set()
        self._under_way: Progress | None = None
        self._kept_step: int | None = None
        self.owes_a_save = self._is_last = False
        self.last_outcome: Outcome | None = None
        self._saver = self._make_saver(Path(options.save)) if options.save else None

    def save(
        self,
        state: TrainState,
        model: list,
        optimizer: Any,
        scheduler: Any,
        *,
        is_last: bool = False,
    ) -> bool:
        """Save the state after ``state.step`` steps.

        A save that fails (full disk, ...) is logged and has no other effect: training continues, and older checkpoints
        stay. With --async-save this method returns when the state is captured, and :meth:`maybe_finalize` completes the
        save. ``is_last``: the run ends with this step.

        Returns:
            True: the checkpoint is complete, or in progress. False: it failed, or there is no --save.
        """
        if self._saver is None:
            return False
        self.maybe_finalize(blocking=True)
        self.owes_a_save, self._is_last = False, is_last
        if self._kept_step == state.step:
            return True
        started_at = time.monotonic()
        kind = content.optimizer_kind(optimizer, self._options.dist_ckpt_optim_fully_reshardable)
        state_dict = content.to_save(
            state,
            model,
            optimizer,
            scheduler,
            kind=kind,
            data_parallel_random_init=self._random_init,
            optimizer_steps=max(self._channel.share(0 if kind is None else optimizer_state.steps(optimizer))),
            run=self._run,
            layout=self._layout,
        )
        started = self._saver.start(state_dict, self._manifest(state.step, kind), started_at)
        del state_dict
        if isinstance(started, Outcome):
            return self._conclude(started)
        self._under_way = Progress(started)
        return self._advance(blocking=not self._options.async_save)

    @property
    def is_saving(self) -> bool:
        """Return whether a save is in progress."""
        return self._under_way is not None

    def maybe_finalize(self, blocking: bool = False) -> None:
        """Advance a save in progress. Call this method after every step.

        It costs nothing when no save is in progress, and never waits for another rank unless ``blocking``.

        Args:
            blocking: whether to wait for the end of the save.
        """
        if self.is_saving:
            self._advance(blocking)

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
            self._channel,
            self._options,
            self._run,
            data_parallel_random_init=self._random_init,
            distrusted=self._distrusted,
            log=self._log,
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
        if not self._options.save:
            return False
        answer = None
        if self._channel.rank == 0:
            try:
                found = inventory.newest_complete(inventory.scan(Path(self._options.save), may_be_missing=True))
                answer = {"found": found is not None}
            except OSError as error:
                answer = {"error": f"--save: {error.filename or self._options.save}: {error.strerror}"}
        answer = self._channel.broadcast(answer)
        if "error" in answer:
            raise UserError(answer["error"], "give a folder that this user can read")
        return answer["found"]

    def rejoin(self) -> None:
        """Abandon a save in progress, and agree again with the other ranks on what is saved. Call it after a recovery.

        All ranks have to call it. An abandoned save is repeated at the end of the next step (``owes_a_save``).
        """
        if self._channel is None:
            return
        if self._under_way is not None:
            self._under_way.abandon()
            self._under_way, self.owes_a_save = None, True
        said = self._channel.share([self._kept_step, self.owes_a_save, sorted(self._distrusted)])
        self._kept_step = max((kept for kept, _, _ in said if kept is not None), default=None)
        self.owes_a_save = any(owes for _, owes, _ in said)
        self._distrusted.update(*(names for _, _, names in said))
        if self._saver is not None:
            self._saver.forget_plan()

    def close(self, abort: bool = False) -> None:
        """Finalize a save in progress, and release the process group.

        Args:
            abort: whether other ranks may be dead: then end the writer, wait for no rank, and leave the partial folder.
        """
        if abort:
            if self._under_way is not None:
                self._under_way.abandon()
            self._under_way = self._channel = self._saver = None
            return
        self.maybe_finalize(blocking=True)
        if self._channel is not None:
            self._channel.close()
        self._channel = self._saver = None

    def _advance(self, blocking: bool) -> bool:
        """Advance the save in progress. Return False if it has ended without a checkpoint."""
        if not self._under_way.advance(blocking):
            return True
        ended, self._under_way = self._under_way, None
        return self._conclude(ended.result)

    def _conclude(self, outcome: Outcome) -> bool:
        self.last_outcome = outcome
        if outcome.error is None:
            self._kept_step = outcome.step
        if self._channel.rank == 0:
            for note in outcome.notes:
                self._log(f"checkpoint: {note}")
            self._log(_message(outcome, self._is_last))
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
            versions={"megatron-core": version("megatron-core"), "torch": torch.__version__},
            optimizer=kind,
            rng_grid=rng.grid(self._random_init)[0],
            run=dict(self._run),
        )

    def _make_saver(self, folder: Path) -> Saver:
        problem = None
        if self._channel.rank == 0:
            try:
                commit.check_writable(folder)
                commit.occupy(folder, os.environ)
            except UserError as error:
                problem = [error.problem, error.fix]
        problem = self._channel.broadcast(problem)
        if problem is not None:
            raise UserError(*problem)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return Saver(
            folder,
            self._channel,
            SavePlanning(group if dist.get_world_size(group) > 1 else None),
            in_background=self._options.async_save,
            keep_last=self._options.keep_last,
            distrusted=self._distrusted,
            log=self._log,
        )

    def _saves_into(self, folder: Path) -> bool:
        return self._saver is not None and self._saver.folder.resolve() == folder.resolve()


def _message(outcome: Outcome, is_last: bool) -> str:
    if outcome.error is not None:
        goes_on = "the run ends without it" if is_last else "training goes on"
        return (
            f"checkpoint: saving step {outcome.step} FAILED: {outcome.error}\n"
            f"  {goes_on}; older checkpoints in {outcome.folder} are as they were"
        )
    size = bytes_in_words(outcome.bytes)
    return f"checkpoint: step {outcome.step} saved to {outcome.folder} ({size}, {outcome.seconds:.1f} s)"
