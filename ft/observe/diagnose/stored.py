"""Read the checkpoints that ``ft diagnose compare`` compares, and check what can be compared.

Runs can be compared if they are runs of the same training, at the steps of which all have a checkpoint.
"""

import argparse
import contextlib
import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ft.base.errors import UserError
from megatron.ft_trainer.arguments.core_options import OF_THE_MODEL
from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.content import SIZES
from megatron.ft_trainer.checkpointing.inventory import Manifest, ManifestError
from megatron.patches.stored_types import read_metadata, reason

COMMON = "common.pt"
"""The file with the part that is the same on all ranks; rank 0 writes it."""
_COMMON_OBJECT = "common_state/shard_0_1"
"""The object that has this part instead in checkpoints of megatron-core 0.19 and later."""

_METADATA = ".metadata"
_SHARDS = re.compile(r"optimizer(?:\.\d+)?\.distributed\..+\.bucket_idx_\d+\.[^.]+")
_ALIGNMENT = 64
"""megatron-core begins each parameter at a multiple of this number of elements in a bucket of gradients."""
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")
_OTHER_VERSION = "compare with the versions of megatron-core and torch that saved it"
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
        pieces: key (see ``Piece.key``) -> piece, of all but the part that is the same on all ranks.
        of_all: the piece with that part; None if it has a file of its own.
    """

    path: Path
    manifest: Manifest
    pieces: dict[tuple, Piece] = field(repr=False)
    of_all: Piece | None = None

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
        if self.of_all is not None:
            found: dict[str, Any] = self.whole(self.of_all)[0]
            return found
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
    with _named(path):
        try:
            has_none = path.is_dir() and not (path / inventory.MANIFEST).exists()
            manifest = _described(path) if has_none else inventory.read_manifest(path)
        except ManifestError as error:
            raise UserError(f"{path} is not a complete checkpoint: {inventory.MANIFEST}: {error}", _RESTORE) from error
    for name, record in manifest.files.items():
        with _named(path / name):
            size = (path / name).stat().st_size
        if size != record.bytes:
            raise UserError(f"{path / name} has {size} bytes instead of {record.bytes}", _RESTORE)
    stored = Stored(path, manifest, {})
    for name in (_METADATA, COMMON):
        if name in manifest.files:
            stored.check(name)
        elif name == _METADATA or not has_none:
            raise UserError(f"{path} has no {name}", _RESTORE)
    found = _read_pieces(path)
    stored.of_all = found.pop((_COMMON_OBJECT, None), None)
    stored.pieces |= found
    return stored


def _read_pieces(path: Path) -> dict[tuple, Piece]:
    try:
        with open(path / _METADATA, "rb") as stream:
            return {piece.key: piece for piece in _pieces(read_metadata(stream))}
    except Exception as error:  # damaged bytes raise errors of any kind
        raise UserError(
            f"{path / _METADATA} does not have the format of the installed torch: {error}", _OTHER_VERSION
        ) from error


def _described(path: Path) -> Manifest:
    """Return the manifest of a checkpoint that has none, as NVIDIA's trainer saves it, made from its arguments.

    The checksums are those of the files as they are. Damage on disk is found by the checksums that torch has stored
    beside each tensor.
    """
    of_all = _read_pieces(path).get((_COMMON_OBJECT, None)) if (path / _METADATA).exists() else None
    if of_all is None and not (path / COMMON).exists():
        problem = f"{path} has neither {COMMON} nor an object common_state: it is not complete, or not of torch_dist"
        raise UserError(problem, "select other steps with --step, or save with --ckpt-format torch_dist")
    files = {file.name: inventory.checksum(file) for file in path.iterdir() if file.is_file()}
    common = Stored(path, Manifest(0, 0, "", {}, {}, None, None, {}, files), {}, of_all).common()
    if not isinstance(common.get("args"), argparse.Namespace) or "iteration" not in common:
        problem = f"{path} has neither a {inventory.MANIFEST} nor the arguments of a run, as a trainer saves them"
        raise UserError(problem, "compare checkpoints that one of the two trainers has saved")
    args, content = vars(common["args"]), common.get("content_metadata", {})
    return Manifest(
        step=common["iteration"],
        serial=0,
        saved_at="",
        layout={short: args.get(name) for short, name in SIZES.items()},
        versions={},
        optimizer=content.get("distrib_optim_sharding_type", "replicated"),
        rng_grid=None,
        run={"model": {name: args.get(name) for name in (*OF_THE_MODEL, "vocab_size")}, "options": {"core": args}},
        files=files,
    )


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


def padding(stored: Stored) -> set[tuple]:
    """Return the keys of pieces that are padding between the parameters in the optimizer's shards.

    Core saves it from memory that nothing has set. A parameter's part of a shard begins at a multiple of ``_ALIGNMENT``
    or where the rank's shard begins. What begins elsewhere is padding. Padding at the beginning of a shard cannot be
    told from a parameter, and with several instances of the optimizer a rank may save another one's shard.
    """
    if (stored.manifest.run.get("options", {}).get("core", {}).get("num_distributed_optimizer_instances") or 1) > 1:
        return set()
    shards = [(p, p.offsets[0]) for p in stored.pieces.values() if p.offsets and _SHARDS.fullmatch(p.name)]
    begins: dict[tuple[str, int], int] = {}
    for piece, start in shards:
        begins[piece.name, piece.rank] = min(start, begins.get((piece.name, piece.rank), start))
    return {p.key for p, start in shards if start % _ALIGNMENT and start != begins[p.name, p.rank]}


def _decoded(stored: Stored, file: str, name: str, stream: Any) -> Any:
    try:
        if zipfile.is_zipfile(stream) and (damaged := zipfile.ZipFile(stream).testzip()):
            place = f"{stored.path / file}: {name}"
            raise UserError(f"{place} was damaged on disk ({damaged}), which says nothing about the training", _RESTORE)
        stream.seek(0)
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
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
    *("save", "save_interval", "load", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir"),
    "ft_extra",
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
        if bool(first.serial) != bool(other.serial):  # what the two store beside the tensors differs in every case
            problem = f"{pair} are of different trainers: one has no {inventory.MANIFEST}, as NVIDIA's trainer saves"
            raise UserError(problem, "compare runs of the same trainer, or restore the manifest")
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
