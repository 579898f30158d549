"""Loads a checkpoint: chooses one, verifies it, checks that it fits, and loads it into model and optimizer."""

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from ft.base.errors import FallbackError, UserError
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.ft_trainer.agreement import from_rank_0, share
from megatron.ft_trainer.arguments.topics import CheckpointOptions
from megatron.ft_trainer.checkpointing import content, inventory, optimizer_state, rng
from megatron.ft_trainer.checkpointing.content import TrainState
from megatron.ft_trainer.checkpointing.inventory import Entry, Manifest
from megatron.patches import stored_types


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


@dataclass
class Loader:
    """Loads checkpoints from one folder. All ranks have to call every method. Arguments are those of ``Checkpointer``.

    Args:
        group: a gloo group of all ranks.
        distrusted: receives the names of checkpoints that fail verification.
    """

    folder: Path
    group: dist.ProcessGroup
    options: CheckpointOptions
    run: Mapping[str, Any]
    distrusted: set[str]
    log: Callable[[str], None]

    def load(self, state: TrainState, model: list, optimizer: Any, scheduler: Any, seed: int) -> LoadReport | None:
        """Load a checkpoint; see :meth:`Checkpointer.load`."""
        started = time.monotonic()
        found = self._choose()
        if found is None:
            return None
        manifest, report = found
        check_run(report.path, manifest, self.run, self.options.finetune)
        kind = None
        if not self.options.finetune:
            ours = content.optimizer_kind(optimizer, self.options.dist_ckpt_optim_fully_reshardable)
            kind = check_optimizer(report.path, manifest, ours)
        shape, _, _ = rng.grid()
        wants_rng = not self.options.finetune and manifest.rng_grid is not None
        with_rng = wants_rng and shape == manifest.rng_grid
        with types_checked(report.path):
            wanted = content.to_load(model, optimizer, kind=kind, with_rng=with_rng)
            loaded = self._read(report.path, wanted)
            content.apply(loaded, model, optimizer, scheduler, with_optimizer=kind is not None)
        if not self.options.finetune:
            content.apply_state(loaded, state)
        if with_rng:
            rng.restore(loaded[rng.KEY])
        elif wants_rng:
            rng.reseed(seed, manifest.step)
            names = "PP", "TP", "DP"
            fits, here = _grid(manifest.rng_grid, names), _grid(shape, names)
            self._say(f"generator states are for {fits}, not {here}: reseeded from seed and step")
        report.optimizer = kind is not None
        report.rng = "restored" if with_rng else "reseeded" if wants_rng else "untouched"
        report.seconds = time.monotonic() - started
        return report

    def _choose(self) -> tuple[Manifest, LoadReport] | None:
        """Return the newest checkpoint that passes verification, or the one of --ckpt-step; None if there is none."""
        entries, tracked = self._entries()
        candidates = self._candidates(entries)
        if candidates is None:
            return None
        rejected = [f"{e.name}: {e.problem}" for e in entries if not e.complete and e not in candidates]
        for entry in candidates:
            manifest, bad = self._verified(entry)
            if not bad:
                self._explain_choice(entry, rejected, tracked)
                return manifest, LoadReport(self.folder / entry.name, entry.step, rejected)
            self.distrusted.add(entry.name)
            rejected.append(f"{entry.name}: {'; '.join(bad)}")
        raise NoUsableCheckpoint(
            f"no usable checkpoint in {self.folder}:" + "".join(f"\n    {line}" for line in rejected),
            "restore a sound copy of one, or give a --load folder without checkpoints to start from random weights; "
            "those of NVIDIA's trainer are loaded by it (--nvidia-trainer, or ft run with its checkout)",
        )

    def _entries(self) -> tuple[list[Entry], str | None]:
        """Return the checkpoints that rank 0 finds in the folder, and the content of the tracker file.

        Raises:
            UserError: rank 0 cannot read the folder.
        """

        def look() -> tuple[list[dict], str | None]:
            try:
                entries = [vars(e) for e in inventory.scan(self.folder, may_be_missing=True)]
                return entries, inventory.tracked_step(self.folder)
            except NotADirectoryError as error:
                problem = f"--load {self.folder}: it is a file, not a folder"
                raise UserError(problem, "give a folder that this user can read") from error
            except OSError as error:
                problem = f"--load: {error.filename or self.folder}: {error.strerror}"
                raise UserError(problem, "give a folder that this user can read") from error

        found, tracked = from_rank_0(look, self.group)
        entries = [Entry(**e) for e in found]
        if not entries and tracked is not None:
            raise NoUsableCheckpoint(
                f"{self.folder / inventory.TRACKER} names step {tracked}, and there is no checkpoint",
                "restore the checkpoint, or remove that file to start from random weights",
            )
        return entries, tracked

    def _candidates(self, entries: list[Entry]) -> list[Entry] | None:
        step = self.options.ckpt_step
        if step is not None:
            chosen = sorted((e for e in entries if e.step == step), key=lambda e: not e.complete)
            if not chosen or not chosen[0].complete:
                why = f": {chosen[0].problem}" if chosen else ""
                steps = ", ".join(str(e.step) for e in entries if e.complete) or "none"
                raise NoUsableCheckpoint(
                    f"{self.folder / inventory.checkpoint_name(step)} is no checkpoint{why}",
                    f"complete ones are of steps: {steps}",
                )
            return chosen
        if not entries:
            if self.options.exit_on_missing_checkpoint:
                raise UserError(
                    f"--load {self.folder} holds no checkpoint, and --exit-on-missing-checkpoint was given",
                    "give the folder of a run that saved one",
                )
            self._say(f"{self.folder} holds none: starting from random weights")
            return None
        return inventory.newest_first(entries)

    def _verified(self, entry: Entry) -> tuple[Manifest | None, list[str]]:
        """Return the checkpoint's manifest, and the problems with its files. All ranks share the work."""
        path = self.folder / entry.name

        def read() -> tuple[str | None, str]:
            try:
                return inventory.read_manifest(path).to_json(), ""
            except (OSError, ValueError) as error:
                return None, f"{inventory.MANIFEST}: {error}"

        text, problem = from_rank_0(read, self.group)
        if text is None:
            return None, [problem]
        manifest = Manifest.from_json(text)
        names = inventory.share_of(manifest.files, dist.get_world_size(), dist.get_rank())
        bad = share(inventory.problems(path, manifest.files, names), self.group)
        return manifest, sorted(line for lines in bad for line in lines)

    def _read(self, path: Path, wanted: dict) -> dict:
        """Read ``wanted`` from the checkpoint."""
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        if "optimizer" in wanted and not optimizer_state.has_moments(stored):
            wanted["optimizer"] = optimizer_state.without_moments(wanted["optimizer"])
            self._say(f"{path.name} was saved before the optimizer's first step: the optimizer begins without moments")
        return dist_checkpointing.load(wanted, str(path))

    def _explain_choice(self, entry: Entry, rejected: list[str], tracked: str | None) -> None:
        if rejected:
            listed = "".join(f"\n    {line}" for line in rejected)
            self._say(f"not usable:{listed}\n  loading {entry.name} instead")
        elif tracked not in (None, str(entry.step)) and self.options.ckpt_step is None:
            self._say(
                f"{inventory.TRACKER} names step {tracked}, the newest complete checkpoint is of step {entry.step}: "
                f"loading that (--ckpt-step {tracked} asks for the other)"
            )

    def _say(self, text: str) -> None:
        if dist.get_rank() == 0:
            self.log(f"checkpoint: {text}")


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
    different = option_differences(manifest.run.get("model", {}), run.get("model", {}))
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


def option_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the options that both sides have, that differ, and that a run may not change, one line each."""
    return [
        f"{name}: {saved[name]} in the checkpoint, {current[name]} in this run"
        for name in current
        if name in saved and not name.startswith(_MAY_CHANGE) and saved[name] != current[name]
    ]
