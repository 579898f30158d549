"""Verifies the sizes and checksums of a checkpoint's files against its manifest. Imports no torch."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from megatron.ft_trainer.checkpointing.manifest import FileRecord, Manifest, ManifestError
from megatron.ft_trainer.checkpointing.naming import MANIFEST, TRACKER, Entry, step_of

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
        raise ManifestError("there is none, as in checkpoints of NVIDIA's trainer") from error
    except UnicodeDecodeError as error:
        raise ManifestError("it is not text") from error
    manifest = Manifest.from_json(text)
    if manifest.step != step_of(checkpoint.name):
        raise ManifestError(f"it is that of step {manifest.step}")
    return manifest


def scan(folder: Path, *, may_be_missing: bool = False) -> list[Entry]:
    """Return every checkpoint in ``folder``, by step. Checks the manifests only.

    Args:
        folder: folder of the checkpoints.
        may_be_missing: whether a folder that does not exist is taken for one without checkpoints.

    Raises:
        OSError: the folder cannot be listed, or a manifest cannot be read.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        if may_be_missing:
            return []
        raise
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return [_entry(folder / name, step) for name, step in steps.items()]


def tracked_step(folder: Path) -> str | None:
    """Return the content of the tracker file in ``folder``, normally a step; None if there is no such file."""
    try:
        return (folder / TRACKER).read_text(errors="replace").strip()[:40]
    except FileNotFoundError:
        return None


def _entry(checkpoint: Path, step: int) -> Entry:
    if not checkpoint.is_dir():
        return Entry(checkpoint.name, step, problem="it is not a folder")
    try:
        return Entry(checkpoint.name, step, read_manifest(checkpoint).serial)
    except ManifestError as error:
        return Entry(checkpoint.name, step, problem=f"{MANIFEST}: {error}")


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
