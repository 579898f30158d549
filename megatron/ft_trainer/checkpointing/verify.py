"""Verifies the sizes and checksums of a checkpoint's files against its manifest. Imports no torch."""

import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.ft_trainer.checkpointing.manifest import FileRecord, Manifest, ManifestError
from megatron.ft_trainer.checkpointing.naming import (
    COMMON,
    COMMON_KEY,
    LEGACY,
    MANIFEST,
    MARK,
    METADATA,
    SHARDED,
    TRACKER,
    Entry,
    step_of,
)

if TYPE_CHECKING:
    from megatron.ft_trainer.arguments.checkpoint import CheckpointOptions

_BLOCK = 1 << 20


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest in folder ``checkpoint``.

    Raises:
        ManifestError: the manifest is missing or damaged, or belongs to another checkpoint.
        OSError: the manifest cannot be read.
    """
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ManifestError("there is none") from error
    except UnicodeDecodeError as error:
        raise ManifestError("it is not text") from error
    manifest = Manifest.from_json(text)
    if manifest.step != step_of(checkpoint.name):
        raise ManifestError(f"it is that of step {manifest.step}")
    return manifest


def manifest_of(folder: Path, entry: Entry) -> Manifest:
    """Return the manifest of a checkpoint in ``folder``, or what the checkpoint says about itself if it has none.

    Raises:
        ManifestError: as for :func:`read_manifest`, or the checkpoint cannot be read.
        OSError: the manifest cannot be read.
    """
    if entry.verifiable:
        return read_manifest(folder / entry.name)
    from megatron.ft_trainer.checkpointing.foreign import describe  # imports torch

    return describe(folder / entry.name)


def scan_all(options: "CheckpointOptions", folder: Path) -> list[Entry]:
    """Return every checkpoint in ``folder``, and those in the folder of non-persistent checkpoints that belongs to it.

    The names of the latter are absolute paths. A folder that does not exist has no checkpoints.

    Raises:
        OSError: as for :func:`scan`.
    """
    try:
        entries = scan(folder)
    except FileNotFoundError:
        entries = []
    also = options.non_persistent_folder(str(folder))
    if also is not None and also.is_dir():
        entries += [replace(e, name=str(also.absolute() / e.name)) for e in scan(also)]
    return entries


def scan(folder: Path) -> list[Entry]:
    """Return every checkpoint in ``folder``, by step. Checks the manifests; of the other files, only their existence
    where there is no manifest.

    Raises:
        OSError: the folder cannot be listed, or a manifest cannot be read.
    """
    tracked = tracked_step(folder)
    steps = {name: step for name in sorted(os.listdir(folder)) if (step := step_of(name)) is not None}
    return [replace(_entry(folder / name, step), tracked=tracked == str(step)) for name, step in steps.items()]


def tracked_step(folder: Path) -> str | None:
    """Return the content of the tracker file in ``folder``, normally a step; None if there is no such file."""
    try:
        return (folder / TRACKER).read_text(errors="replace").strip()[:40]
    except FileNotFoundError:
        return None


def _entry(checkpoint: Path, step: int) -> Entry:
    if not checkpoint.is_dir():
        return Entry(checkpoint.name, step, problem="it is not a folder")
    if not (checkpoint / MANIFEST).exists():
        return _without_manifest(checkpoint, step)
    try:
        return Entry(checkpoint.name, step, read_manifest(checkpoint).serial)
    except ManifestError as error:
        return Entry(checkpoint.name, step, problem=f"{MANIFEST}: {error}")


def _without_manifest(checkpoint: Path, step: int) -> Entry:
    """Return the entry of a checkpoint of Megatron-LM, or of one whose manifest is lost.

    From release 0.19 on, Megatron-LM stores the part that is not sharded among the sharded objects.
    """
    legacy = next(checkpoint.glob(f"mp_rank_*/{LEGACY}"), None)
    missing = [name for name in SHARDED if legacy is None and not (checkpoint / name).is_file()]
    if missing == [COMMON] and COMMON_KEY.encode() in (checkpoint / METADATA).read_bytes():
        missing = []
    if missing and any(checkpoint.glob("mp_rank_*")):
        missing = [LEGACY]
    kind, problem = "none", None
    if missing:
        problem = f"{MANIFEST}: there is none, and {', '.join(missing)} is missing, too"
    elif (legacy or checkpoint / COMMON).exists() and _is_marked(legacy or checkpoint / COMMON):
        kind, problem = "lost", f"{MANIFEST}: there is none, although the checkpoint was saved with one"
    return Entry(checkpoint.name, step, problem=problem, manifest=kind)


def _is_marked(path: Path) -> bool:
    """Return whether this trainer saved the file, and so a manifest beside it. Imports no torch."""
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return MARK.encode() in archive.read(pickled)
    except (zipfile.BadZipFile, ValueError):
        return False


def share_of(files: Mapping[str, FileRecord], ranks: int, rank: int) -> list[str]:
    """Return the names of the files that ``rank`` of ``ranks`` verifies: files are assigned to the ranks in turn, the
    largest first.
    """
    return sorted(files, key=lambda name: (-files[name].bytes, name))[rank::ranks]


def problems(checkpoint: Path, files: Mapping[str, FileRecord], names: list[str] | None = None) -> list[str]:
    """Return what is wrong with the files called ``names`` (default: all), one line for each bad file.

    Args:
        checkpoint: the checkpoint's folder.
        files: name -> size and checksum, from the manifest.
        names: names of the files to verify.
    """
    found = []
    for name in sorted(files) if names is None else names:
        problem = _problem(checkpoint / name, files[name])
        if problem is not None:
            found.append(f"{name} {problem}")
    return found


def checksum(path: Path) -> FileRecord:
    """Return the size and CRC-32 of the file."""
    crc, count = 0, 0
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as stream:
        while read := stream.readinto(block):
            crc = zlib.crc32(block[:read], crc)
            count += read
    return FileRecord(count, crc)


def _problem(path: Path, expected: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"has {size} bytes instead of {expected.bytes}"
        found = checksum(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == expected else f"is corrupt: checksum {found.crc32:08x} instead of {expected.crc32:08x}"
