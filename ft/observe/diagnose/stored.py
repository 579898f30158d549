"""Read the checkpoints that ``ft diagnose compare`` compares, and check what can be compared.

Runs can be compared if they are runs of the same training, at the steps of which all have a checkpoint.
"""

import argparse
import contextlib
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ft.base.errors import UserError
from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.inventory import Manifest, ManifestError
from megatron.patches.stored_types import read_metadata, reason

COMMON = "common.pt"
"""The file with the part that is the same on all ranks; rank 0 writes it."""

_METADATA = ".metadata"
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")
_OTHER_VERSION = "compare with the versions that the manifest names"
_RESTORE = "restore an undamaged copy of this checkpoint, or select other steps with --step"

_ALLOWED = [argparse.Namespace, numpy.ndarray, numpy.dtype, numpy.empty(0).__reduce__()[0]]
_ALLOWED += [kind for name in dir(numpy.dtypes) if isinstance(kind := getattr(numpy.dtypes, name), type)]
"""Types that checkpoints may contain besides tensors and Python's built-in types. They are needed for the states of
random number generators and for the run's flags.
"""


@dataclass(frozen=True)
class Piece:
    """One shard of a tensor, or one object.

    Attributes:
        name: key of the tensor or object in the checkpoint.
        offsets: offsets of the shard in the whole tensor; None for an object.
        start: offset in the file in bytes.
        length: length in bytes.
    """

    name: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype | None
    file: str
    start: int
    length: int

    @property
    def key(self) -> tuple:
        """Return the key that identifies the piece in the checkpoints of all runs."""
        return self.name, self.offsets

    @property
    def shape(self) -> tuple:
        """Return (shape, shape of the whole tensor, dtype), which must be equal for two pieces to be comparable."""
        return self.sizes, self.whole, self.dtype

    @property
    def rank(self) -> int:
        """Return the logical rank that wrote the piece."""
        match = _WRITER.fullmatch(self.file)
        return int(match.group(1)) if match else 0


@dataclass
class Stored:
    """One checkpoint on disk.

    Attributes:
        pieces: key (see ``Piece.key``) -> piece.
    """

    path: Path
    manifest: Manifest
    pieces: dict[tuple, Piece] = field(repr=False)

    def whole(self, piece: Piece) -> Any:
        """Read a whole tensor or object.

        Raises:
            UserError: the file is damaged, or contains a type that is not read from checkpoints.
        """
        with _named(self.path / piece.file), open(self.path / piece.file, "rb") as stream:
            stream.seek(piece.start)
            data = stream.read(piece.length)
        return _decoded(self, piece.file, piece.name, io.BytesIO(data))

    def common(self) -> dict[str, Any]:
        """Read the part that is the same on all ranks.

        Raises:
            UserError: as for ``whole``.
        """
        with _named(self.path / COMMON), open(self.path / COMMON, "rb") as stream:
            return _decoded(self, COMMON, COMMON, stream)

    def check(self, file: str) -> None:
        """Check that a file is unchanged since it was written.

        Raises:
            UserError: the file's size or checksum differs from that in the manifest.
        """
        bad = inventory.problems(self.path, self.manifest.files, [file])
        if bad:
            raise UserError(
                f"{self.path}: {bad[0]}; the file was damaged on disk, which says nothing about the training", _RESTORE
            )


def read(path: Path) -> Stored:
    """Return the checkpoint in folder ``path``.

    Raises:
        UserError: it is incomplete, a file is missing or has another size, or one of its small files is damaged.
    """
    if path.is_dir() and not (path / inventory.MANIFEST).exists():
        raise UserError(
            f"{path} has no {inventory.MANIFEST}, like a checkpoint that Megatron-LM has saved; without its checksums, "
            "damage on disk cannot be told from a fault in training",
            "restore the manifest, or compare checkpoints of the reference trainer (--reference-trainer)",
        )
    with _named(path):
        try:
            manifest = inventory.read_manifest(path)
        except ManifestError as error:
            raise UserError(f"{path} is not a complete checkpoint: {inventory.MANIFEST}: {error}", _RESTORE) from error
    for name, record in manifest.files.items():
        with _named(path / name):
            size = (path / name).stat().st_size
        if size != record.bytes:
            raise UserError(f"{path / name} has {size} bytes instead of {record.bytes}", _RESTORE)
    stored = Stored(path, manifest, {})
    for name in (_METADATA, COMMON):
        if name not in manifest.files:
            raise UserError(f"{path} has no {name}", _RESTORE)
        stored.check(name)
    try:
        with open(path / _METADATA, "rb") as stream:
            stored.pieces |= {piece.key: piece for piece in _pieces(read_metadata(stream))}
    except Exception as error:  # damaged bytes raise errors of any kind
        raise UserError(
            f"{path / _METADATA} does not have the format of the installed torch: {error}", _OTHER_VERSION
        ) from error
    return stored


def _pieces(metadata: Metadata) -> list[Piece]:
    """Return the pieces in the order of ranks, files and positions."""
    tensors = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
    sizes = {(name, tuple(c.offsets)): tuple(c.sizes) for name, about in tensors.items() for c in about.chunks}
    found = []
    for index, place in metadata.storage_data.items():
        where = (place.relative_path, place.offset, place.length)
        about = tensors.get(index.fqn)
        if about is None:
            found.append(Piece(index.fqn, None, (), (), None, *where))
        else:
            at = tuple(index.offset)
            shape = (sizes[index.fqn, at], tuple(about.size), about.properties.dtype)
            found.append(Piece(index.fqn, at, *shape, *where))
    return sorted(found, key=lambda piece: (piece.rank, piece.file, piece.start))


def _decoded(stored: Stored, file: str, name: str, stream: Any) -> Any:
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        stored.check(file)
        raise UserError(f"{stored.path / file}: {name} cannot be read: {reason(error)}", _OTHER_VERSION) from error


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into UserErrors about ``path``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}", _RESTORE) from error


_BESIDE = ("checkpoint", "logging", "fault_tolerance", "evaluation")
"""Groups of the trainer's flags that do not affect the computed numbers. ``_NO_MATTER`` lists such flags of other
groups.
"""
_NO_MATTER = {
    *("data_cache_path", "num_workers", "mmap_bin_files", "num_dataset_builder_threads", "local_rank"),
    *("exit_interval", "exit_duration_in_mins", "exit_signal_handler", "exit_signal", "distributed_timeout_minutes"),
}


@dataclass(frozen=True)
class SavedRun:
    """One run that is compared.

    Attributes:
        name: path of its folder as the user wrote it.
        folder: folder that the run got as ``--save``.
    """

    name: str
    folder: Path
    steps: tuple[int, ...]

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / inventory.checkpoint_name(step)


def open_runs(folders: Sequence[Path]) -> list[SavedRun]:
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


def _open(folder: Path) -> SavedRun:
    try:
        entries = inventory.scan(folder)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}", "give a --save folder") from error
    if not entries:
        inside = inventory.step_of(folder.name) is not None
        fix = f"give {folder.parent} and --step {inventory.step_of(folder.name)}" if inside else "give a --save folder"
        raise UserError(f"{folder} holds no checkpoints", fix)
    return SavedRun(str(folder), folder, tuple(entry.step for entry in entries))


def common_steps(runs: Sequence[SavedRun], asked: Sequence[int] | None) -> tuple[int, ...]:
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


def _common(runs: Sequence[SavedRun]) -> set[int]:
    return set(runs[0].steps).intersection(*(run.steps for run in runs))


def _listed(steps: Iterable[int]) -> str:
    shown = sorted(steps)
    return ", ".join(map(str, shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-3:]]))


def check_alike(runs: Sequence[SavedRun], stored: Sequence[Stored]) -> None:
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


def notes(runs: Sequence[SavedRun], stored: Sequence[Stored]) -> list[str]:
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


def _different(name: str, runs: Sequence[SavedRun], values: Sequence[Any]) -> list[str]:
    if all(value == values[0] for value in values):
        return []
    return [f"{name} differs: " + ", ".join(f"{v} in {run.name}" for run, v in zip(runs, values, strict=True))]


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return one indented line for each name whose values differ."""
    names = sorted(ours.keys() | theirs.keys())
    return "".join(f"\n    {n}: {ours.get(n)} and {theirs.get(n)}" for n in names if ours.get(n) != theirs.get(n))
