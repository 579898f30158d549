"""Open the runs that ``ft diagnose compare`` compares, and check that they are runs of the same training.

A run is given by its folder of checkpoints. The module also finds the steps of which all runs have a checkpoint, and
collects caveats.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.observe.diagnose.stored import Stored
from megatron.ft_trainer.checkpointing import naming, verify

_BESIDE = ("checkpoint", "logging", "fault_tolerance", "evaluation")
"""Groups of the trainer's flags that do not affect the computed numbers. ``_NO_MATTER`` lists such flags of other
groups.
"""
_NO_MATTER = {
    *("data_cache_path", "num_workers", "mmap_bin_files", "num_dataset_builder_threads", "local_rank"),
    *("exit_interval", "exit_duration_in_mins", "exit_signal_handler", "exit_signal", "distributed_timeout_minutes"),
}


@dataclass(frozen=True)
class Run:
    """One run that is compared.

    Attributes:
        name: path of its folder as the user wrote it.
        folder: folder that the run got as ``--save``.
        steps: steps of which the folder contains a checkpoint, in order.
    """

    name: str
    folder: Path
    steps: tuple[int, ...]

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / naming.checkpoint_name(step)


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in ``folders``.

    Raises:
        UserError: there are fewer than two folders, one is given twice, is missing, or holds no checkpoint.
    """
    if len(folders) < 2:
        raise UserError("a comparison needs at least two runs", "give two --save folders or more")
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (same := seen.setdefault(folder.resolve(), folder)) is not folder:
            raise UserError(f"{same} and {folder} are the same folder", "give every run once")
    return [_open(folder) for folder in folders]


def _open(folder: Path) -> Run:
    try:
        entries = verify.scan(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}", "give a --save folder") from error
    if not entries:
        inside = naming.step_of(folder.name) is not None
        fix = f"give {folder.parent} and --step {naming.step_of(folder.name)}" if inside else "give a --save folder"
        raise UserError(f"{folder} holds no checkpoints", fix)
    return Run(str(folder), folder, tuple(entry.step for entry in entries))


def common_steps(runs: Sequence[Run], asked: Sequence[int] | None) -> tuple[int, ...]:
    """Return the steps to compare, in order.

    Raises:
        UserError: the runs have no step in common, or a run lacks a step that was asked for.
    """
    for step in asked or ():
        for run in runs:
            if step not in run.steps:
                raise UserError(f"{run.name} has no checkpoint of step {step}", f"it has {_listed(run.steps)}")
    common = _common(runs)
    if not common:
        had = "".join(f"\n    {run.name}: {_listed(run.steps)}" for run in runs)
        raise UserError(f"no step has a checkpoint in every run:{had}", "save at the same steps: --save-interval")
    return tuple(sorted(set(asked) if asked else common))


def _common(runs: Sequence[Run]) -> set[int]:
    return set(runs[0].steps).intersection(*(run.steps for run in runs))


def _listed(steps: Iterable[int]) -> str:
    shown = sorted(steps)
    return ", ".join(map(str, shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]]))


def check_alike(runs: Sequence[Run], stored: Sequence[Stored]) -> None:
    """Check that the checkpoints have the same model, layout, training inputs and content.

    Raises:
        UserError: they differ in one of these; the message names the difference.
    """
    first = stored[0].manifest
    for run, each in zip(runs[1:], stored[1:], strict=True):
        other = each.manifest
        pair = f"{runs[0].name} and {run.name}"
        if lines := _differences(first.run.get("model", {}), other.run.get("model", {})):
            raise UserError(f"{pair} are of different models:{lines}", "compare runs with the same flags")
        if lines := _differences(first.layout, other.layout):
            raise UserError(f"{pair} were saved from different layouts:{lines}", "compare runs with the same sizes")
        if lines := _differences(first.run.get("fingerprints", {}), other.run.get("fingerprints", {})):
            raise UserError(f"{pair} were trained on different inputs:{lines}", "compare runs with the same data")
        content = [{"optimizer": m.optimizer, "generators": m.rng_grid} for m in (first, other)]
        if lines := _differences(*content):
            raise UserError(f"{pair} contain different data:{lines}", "save both with the same checkpoint flags")
        _check_pieces(pair, stored[0], each)


def _check_pieces(pair: str, first: Stored, other: Stored) -> None:
    fix = "compare runs with the same flags and versions"
    if lone := first.pieces.keys() ^ other.pieces.keys():
        name = min(key[0] for key in lone)
        raise UserError(f"{pair} contain different shards: {len(lone)} are only in one of them, such as {name}", fix)
    for key, piece in first.pieces.items():
        if piece.shape != other.pieces[key].shape:
            shapes = " and ".join(f"{list(p.sizes)} {p.dtype}" for p in (piece, other.pieces[key]))
            raise UserError(f"{pair} hold {piece.name} as {shapes}", fix)


def notes(runs: Sequence[Run], stored: Sequence[Stored]) -> list[str]:
    """Return caveats about the comparison: steps that only some runs have, differing flags, missing determinism."""
    found = []
    for run in runs:
        if lone := set(run.steps) - _common(runs):
            found.append(f"{run.name} has steps that not every run has: {_listed(lone)}")
    flags = [dict(_flags(each.manifest.run.get("options", {}))) for each in stored]
    unsafe = [run.name for run, given in zip(runs, flags, strict=True) if given.get("deterministic_mode") is False]
    if unsafe:
        found.append(f"without --deterministic-mode, differences may be due to rounding: {', '.join(unsafe)}")
    for name in sorted(set().union(*flags)):
        found += _different(f"--{name.replace('_', '-')}", runs, [given.get(name) for given in flags])
    for name in sorted(stored[0].manifest.versions):
        found += _different(name, runs, [each.manifest.versions.get(name) for each in stored])
    return found


def _flags(options: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for group, values in options.items():
        if group not in _BESIDE and isinstance(values, Mapping):
            yield from ((name, value) for name, value in values.items() if name not in _NO_MATTER)


def _different(name: str, runs: Sequence[Run], values: Sequence[Any]) -> list[str]:
    if all(value == values[0] for value in values):
        return []
    return [f"{name} differs: " + ", ".join(f"{v} in {run.name}" for run, v in zip(runs, values, strict=True))]


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return one indented line for each name whose values differ."""
    names = sorted(ours.keys() | theirs.keys())
    return "".join(f"\n    {n}: {ours.get(n)} and {theirs.get(n)}" for n in names if ours.get(n) != theirs.get(n))
