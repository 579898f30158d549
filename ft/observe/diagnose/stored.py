"""Read a checkpoint from disk for ``ft diagnose compare``: its pieces in the order of its files, one block at a time.

A piece is one shard of a tensor, or one object. The manifest is the checkpoint's list of its files, with their sizes
and checksums, and a description of the run that wrote them.
"""

import argparse
import io
import os
import pickle
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ft.base.errors import UserError
from megatron.ft_trainer.checkpointing import naming, verify
from megatron.ft_trainer.checkpointing.manifest import Manifest, ManifestError
from megatron.patches.stored_types import read_metadata, reason

COMMON = "common.pt"
"""The file with the part that is the same on all ranks; rank 0 writes it."""

BLOCK = 1 << 20
"""Bytes read at a time."""

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
        sizes: shape of the shard.
        whole: shape of the whole tensor.
        dtype: dtype of the tensor; None for an object.
        file: name of the file that holds the piece.
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
        path: folder of the checkpoint.
        manifest: the checkpoint's list of files with checksums, and the description of its run.
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
        bad = verify.problems(self.path, self.manifest.files, [file])
        if bad:
            raise UserError(
                f"{self.path}: {bad[0]}; the file was damaged on disk, which says nothing about the training", _RESTORE
            )


class Blocks:
    """Reads one checkpoint's pieces once, in the order of its files, and verifies the files' checksums meanwhile."""

    def __init__(self, stored: Stored):
        self._stored, self._file, self._stream = stored, None, None
        self._crc, self._at = 0, 0
        self._checked: set[str] = set()

    def of(self, piece: Piece) -> Iterator[bytes]:
        """Yield the bytes of ``piece`` in blocks.

        Raises:
            UserError: a file cannot be read, ends early, or is damaged.
        """
        if piece.file != self._file:
            self.finish()
            self._open(piece.file)
        self._at, left = piece.start, piece.length
        while left:
            with _named(self._stored.path / piece.file):
                data = os.pread(self._stream.fileno(), min(left, BLOCK), self._at)
            if not data:
                self._stored.check(piece.file)
                raise UserError(f"{self._stored.path / piece.file} ends within {piece.name}", _RESTORE)
            self._crc = zlib.crc32(data, self._crc)
            self._at += len(data)
            left -= len(data)
            yield data

    def finish(self) -> None:
        """Close the current file.

        Raises:
            UserError: its checksum differs from that in the manifest.
        """
        if self._stream is None:
            return
        self._stream.close()
        self._stream, file = None, self._file
        record = self._stored.manifest.files[file]
        if file not in self._checked and self._crc != record.crc32:
            self._stored.check(file)  # verify again: reading the pieces out of order also changes the running checksum
        self._checked.add(file)
        self._file = None

    def _open(self, file: str) -> None:
        with _named(self._stored.path / file):
            self._stream = open(self._stored.path / file, "rb", buffering=0)  # noqa: SIM115 (closed by finish)
        self._file, self._crc = file, 0


def read(path: Path) -> Stored:
    """Return the checkpoint in folder ``path``.

    Raises:
        UserError: it is incomplete, a file is missing or has another size, or one of its small files is damaged.
    """
    if path.is_dir() and not (path / naming.MANIFEST).exists():
        raise UserError(
            f"{path} has no {naming.MANIFEST}, like a checkpoint that Megatron-LM has saved; without its checksums, "
            "damage on disk cannot be told from a fault in training",
            "restore the manifest, or compare checkpoints of this project's trainer",
        )
    with _named(path):
        try:
            manifest = verify.read_manifest(path)
        except ManifestError as error:
            raise UserError(f"{path} is not a complete checkpoint: {naming.MANIFEST}: {error}", _RESTORE) from error
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


class _named:
    """Context manager that turns errors of the operating system into UserErrors about ``path``."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, OSError):
            raise UserError(f"{error.filename or self._path}: {error.strerror}", _RESTORE) from error
