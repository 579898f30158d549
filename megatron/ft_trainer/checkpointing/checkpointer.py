"""Saves and loads a run's checkpoints: the interface of the training loop.

To load is to choose a checkpoint, to verify its files, to check that it fits this run, and to load it into model,
optimizer, schedule and random generators.
"""

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from ft.base import events
from ft.base.errors import FallbackError, UserError
from ft.state.snapshot import optimizers
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.ft_trainer.agreement import from_rank_0, share
from megatron.ft_trainer.arguments.topics import CheckpointOptions
from megatron.ft_trainer.checkpointing import commit, content, inventory, rng, save
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.checkpointing.inventory import Entry, Manifest, bytes_in_words
from megatron.ft_trainer.checkpointing.save import SaveOutcome
from megatron.patches import stored_types

Reseed = Callable[[int], None]
SLOWEST_WRITE = timedelta(hours=6)
"""Timeout of the group for checkpoints: a rank that has written its files waits there for the slowest one. A slow disk
is not a failure, and a dead rank is detected by others, so it is far longer than a write takes."""


class NoUsableCheckpoint(FallbackError, UserError):
    """There are checkpoints, or one was requested by its step, but none can be used."""


@dataclass
class LoadReport:
    """The result of loading a checkpoint.

    Args:
        step: the checkpoint's step (with --finetune the run starts at 0 nevertheless).
        rejected: checkpoints that were not usable, one text each: name and problem.
        optimizer: whether optimizer and schedule were loaded.
        rng: ``restored``, ``reseeded`` (the saved states belong to another layout) or ``untouched``.
        seconds: seconds in total.
    """

    path: Path
    step: int
    rejected: list[str] = field(default_factory=list)
    optimizer: bool = False
    rng: str = "untouched"
    seconds: float = 0.0


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
        self.last_outcome: SaveOutcome | None = None
        self._folder = Path(options.save) if options.save else None
        if self._folder is not None:
            from_rank_0(lambda: commit.take(self._folder, os.environ), self._group)

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

    def load(self, state: TrainState, model: list, optimizer: Any, scheduler: Any, reseed: Reseed) -> LoadReport | None:
        """Load the newest checkpoint that passes verification, or the one of --ckpt-step, into the given objects.

        Args:
            state: receives the position of the run.
            model: model chunks.
            optimizer: the optimizer; None: its state is not loaded.
            scheduler: the learning-rate schedule, or None.
            reseed: seeds the random generators for a step; called with the checkpoint's if the saved states of the
                generators belong to another layout.

        Returns:
            A report of what was loaded; None without --load, or if the folder contains no checkpoint.

        Raises:
            NoUsableCheckpoint: there are checkpoints, but all are broken; or the one of --ckpt-step is not usable.
            UserError: the folder cannot be read, is empty under --exit-on-missing-checkpoint, or the checkpoint belongs
                to another model, tokenizer or kind of optimizer.
        """
        if not self._options.load:
            return None
        started, finetune = time.monotonic(), self._options.finetune
        found = self._choose()
        if found is None:
            return None
        manifest, report = found
        check_run(report.path, manifest, self._run, finetune)
        kind = None
        if not finetune:
            ours = content.optimizer_kind(optimizer, self._options.dist_ckpt_optim_fully_reshardable)
            kind = check_optimizer(report.path, manifest, ours)
        shape, _, _ = rng.grid()
        wants_rng = not finetune and manifest.rng_grid is not None
        with_rng = wants_rng and shape == manifest.rng_grid
        with types_checked(report.path):
            wanted = content.to_load(model, optimizer, kind=kind, with_rng=with_rng)
            loaded = self._read(report.path, wanted)
            content.apply(loaded, model, optimizer, scheduler, with_optimizer=kind is not None)
        if not finetune:
            content.apply_state(loaded, state)
            if self._folder is not None and self._folder.resolve() == self._source.resolve():
                self._kept_step = report.step
        if with_rng:
            rng.restore(loaded[rng.KEY])
        elif wants_rng:
            reseed(manifest.step)
            names = "PP", "TP", "DP"
            fits, here = _grid(manifest.rng_grid, names), _grid(shape, names)
            self._say(f"generator states are for {fits}, not {here}: reseeded from seed and step")
        report.optimizer = kind is not None
        report.rng = "restored" if with_rng else "reseeded" if wants_rng else "untouched"
        report.seconds = time.monotonic() - started
        return report

    def has_own(self) -> bool:
        """Return whether the folder of --save holds a complete checkpoint. All ranks have to call it.

        Raises:
            UserError: rank 0 cannot read the folder.
        """
        if self._folder is None:
            return False
        entries, _ = self._entries("--save", self._folder)
        return inventory.newest_complete(entries) is not None

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

    def _conclude(self, outcome: SaveOutcome, is_last: bool) -> bool:
        self.last_outcome = outcome
        if outcome.error is None:
            self._kept_step = outcome.step
        if dist.get_rank() == 0:
            for note in (*outcome.notes, _message(outcome, is_last)):
                self._say(note)
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

    @property
    def _source(self) -> Path:
        return Path(self._options.load)

    def _choose(self) -> tuple[Manifest, LoadReport] | None:
        """Return the newest checkpoint that passes verification, or the one of --ckpt-step; None if there is none."""
        entries, tracked = self._entries("--load", self._source)
        if not entries and tracked is not None:
            raise NoUsableCheckpoint(
                f"{self._source / inventory.TRACKER} names step {tracked}, and there is no checkpoint",
                "restore the checkpoint, or remove that file to start from random weights",
            )
        candidates = self._candidates(entries)
        if candidates is None:
            return None
        rejected = [f"{e.name}: {e.problem}" for e in entries if not e.complete and e not in candidates]
        for entry in candidates:
            manifest, bad = self._verified(entry)
            if not bad:
                self._explain_choice(entry, rejected, tracked)
                return manifest, LoadReport(self._source / entry.name, entry.step, rejected)
            self._distrusted.add(entry.name)
            rejected.append(f"{entry.name}: {'; '.join(bad)}")
        raise NoUsableCheckpoint(
            f"no usable checkpoint in {self._source}:" + "".join(f"\n    {line}" for line in rejected),
            "restore a sound copy of one, or give a --load folder without checkpoints to start from random weights; "
            "those of NVIDIA's trainer are loaded by it (--nvidia-trainer, or ft run with its checkout)",
        )

    def _entries(self, flag: str, folder: Path) -> tuple[list[Entry], str | None]:
        """Return the checkpoints in the folder of ``flag``, and the content of the tracker file (None: there is none).

        Rank 0 decides, because a file system may show a new checkpoint to some ranks earlier than to others.

        Raises:
            UserError: rank 0 cannot read the folder.
        """

        def look() -> tuple[list[dict], str | None]:
            try:
                entries = [vars(e) for e in inventory.scan(folder, may_be_missing=True)]
                return entries, inventory.tracked_step(folder)
            except OSError as error:
                fix = "give a folder that this user can read"
                if isinstance(error, NotADirectoryError):
                    raise UserError(f"{flag} {folder}: it is a file, not a folder", fix) from error
                raise UserError(f"{flag}: {error.filename or folder}: {error.strerror}", fix) from error

        found, tracked = from_rank_0(look, self._group)
        return [Entry(**e) for e in found], tracked

    def _candidates(self, entries: list[Entry]) -> list[Entry] | None:
        step = self._options.ckpt_step
        if step is not None:
            chosen = sorted((e for e in entries if e.step == step), key=lambda e: not e.complete)
            if not chosen or not chosen[0].complete:
                why = f": {chosen[0].problem}" if chosen else ""
                steps = ", ".join(str(e.step) for e in entries if e.complete) or "none"
                raise NoUsableCheckpoint(
                    f"{self._source / inventory.checkpoint_name(step)} is no checkpoint{why}",
                    f"complete ones are of steps: {steps}",
                )
            return chosen
        if not entries:
            if self._options.exit_on_missing_checkpoint:
                raise UserError(
                    f"--load {self._source} holds no checkpoint, and --exit-on-missing-checkpoint was given",
                    "give the folder of a run that saved one",
                )
            self._say(f"{self._source} holds none: starting from random weights")
            return None
        return inventory.newest_first(entries)

    def _verified(self, entry: Entry) -> tuple[Manifest | None, list[str]]:
        """Return the checkpoint's manifest, and the problems with its files. All ranks share the work."""
        path = self._source / entry.name

        def read() -> tuple[str | None, str]:
            try:
                return inventory.read_manifest(path).to_json(), ""
            except (OSError, ValueError) as error:
                return None, f"{inventory.MANIFEST}: {error}"

        text, problem = from_rank_0(read, self._group)
        if text is None:
            return None, [problem]
        manifest = Manifest.from_json(text)
        names = inventory.share_of(manifest.files, dist.get_world_size(), dist.get_rank())
        bad = share(inventory.problems(path, manifest.files, names), self._group)
        return manifest, sorted(line for lines in bad for line in lines)

    def _read(self, path: Path, wanted: dict) -> dict:
        """Read ``wanted`` from the checkpoint."""
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        if "optimizer" in wanted and not content.has_moments(stored):
            wanted["optimizer"] = content.without_moments(wanted["optimizer"])
            self._say(f"{path.name} was saved before the optimizer's first step: the optimizer begins without moments")
        return dist_checkpointing.load(wanted, str(path))

    def _explain_choice(self, entry: Entry, rejected: list[str], tracked: str | None) -> None:
        if rejected:
            listed = "".join(f"\n    {line}" for line in rejected)
            self._say(f"not usable:{listed}\n  loading {entry.name} instead")
        elif tracked not in (None, str(entry.step)) and self._options.ckpt_step is None:
            self._say(
                f"{inventory.TRACKER} names step {tracked}, the newest complete checkpoint is of step {entry.step}: "
                f"loading that (--ckpt-step {tracked} asks for the other)"
            )

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            self._log(f"checkpoint: {text}")


def _message(outcome: SaveOutcome, is_last: bool) -> str:
    if outcome.error is not None:
        goes_on = "the run ends without it" if is_last else "training goes on"
        return (
            f"saving step {outcome.step} FAILED: {outcome.error}\n"
            f"  {goes_on}; older checkpoints in {outcome.folder} are as they were"
        )
    size = bytes_in_words(outcome.bytes)
    return f"step {outcome.step} saved to {outcome.folder} ({size}, {outcome.seconds:.1f} s)"


@contextlib.contextmanager
def types_checked(path: Path) -> Iterator[None]:
    """In this context, a pickle that names what no checkpoint needs, and a tensor that the checkpoint at ``path`` lacks
    or has in another shape, is a UserError.
    """
    problem: BaseException | None = None
    try:
        yield
    except (pickle.UnpicklingError, CheckpointingException) as error:
        problem = error
    except CheckpointException as error:  # torch's, with those of all ranks
        found = [each for each, _ in error.failures.values()]
        problem = next((each for each in found if isinstance(each, pickle.UnpicklingError)), found[0])
    if isinstance(problem, pickle.UnpicklingError):
        raise UserError(
            f"{path} is refused, because to read it could execute code: {stored_types.reason(problem)}",
            "load a checkpoint from a source that you trust",
        ) from problem
    if problem is not None:
        fix = "give the options that the checkpoint was saved with, or another --load"
        raise UserError(f"{path} does not fit this model: {problem}", fix) from problem


def _grid(shape: Iterable[int], names: Sequence[str] = ("PP", "TP", "EP")) -> str:
    return " x ".join(f"{name}{size}" for name, size in zip(names, shape, strict=False))


_MAY_CHANGE = ("rotary", "rope_", "use_rope_", "layernorm_epsilon", "moe_router_")
"""Beginnings of the names of the model's options that a run may change on purpose."""


def check_run(path: Path, manifest: Manifest, run: Mapping[str, Any], finetune: bool) -> None:
    """Check that the checkpoint at ``path`` belongs to this run's model and, unless it is finetuned, tokenizer.

    Raises:
        UserError: the model or the tokenizer differs.
    """
    saved, current = manifest.run.get("model", {}), run.get("model", {})
    different = [
        f"{name}: {saved[name]} in the checkpoint, {current[name]} in this run"
        for name in current
        if name in saved and not name.startswith(_MAY_CHANGE) and saved[name] != current[name]
    ]
    if different:
        raise UserError(
            f"{path} is of another model:" + "".join(f"\n    {line}" for line in different),
            "give the options that the checkpoint was saved with, or another --load",
        )
    there, here = (each.get("fingerprints", {}).get("tokenizer") for each in (manifest.run, run))
    if None not in (there, here) and there != here and not finetune:
        raise UserError(
            f"{path} was trained with tokenizer {there}, this run has {here}",
            "use the same tokenizer, or --finetune to go on with another one on purpose",
        )


def check_optimizer(path: Path, manifest: Manifest, ours: str | None) -> str | None:
    """Return the format of the optimizer state at ``path`` (see ``content``); None if this run has no optimizer.

    ``ours``: the format in which this run would store its own.

    Raises:
        UserError: the checkpoint has no optimizer state, or the state cannot be loaded into this run's optimizer.
    """
    if ours is None:
        return None
    advice = "add --finetune to begin at step 0 with these weights and a fresh optimizer"
    if manifest.optimizer is None or (manifest.optimizer == "replicated") != (ours == "replicated"):
        stored = "no optimizer state" if manifest.optimizer is None else f"a {manifest.optimizer} optimizer state"
        raise UserError(
            f"{path} holds {stored}, and this run's is {ours}", f"switch --use-distributed-optimizer, or {advice}"
        )
    here = {
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }
    there = {name: manifest.layout.get(name, 1) for name in here}
    if manifest.optimizer == "dp_reshardable" and here != there:
        raise UserError(
            f"{path} was saved with --no-dist-ckpt-optim-fully-reshardable from {_grid(there.values())} "
            f"and does not load into {_grid(here.values())}",
            f"use the old sizes, or {advice}",
        )
    return manifest.optimizer
