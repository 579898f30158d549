"""What a --save folder holds: the names in it, the manifest of each checkpoint, and the check of all files against it.

::

    <save>/latest_checkpointed_iteration.txt      what Megatron's tools read first
    <save>/iter_0000100/                          a complete checkpoint: it gets this name last
    <save>/iter_0000200.4f0c91d2.partial/         a save in progress, or the remains of an interrupted one
    <save>/in_use_by.json                         the ``ft run`` that saves here
    <save>/iter_0000050.removed/                  a checkpoint that is being removed
    <save>/iter_0000200.4f0c91d2.removed/         a checkpoint that another save of the same step has replaced

The manifest is a JSON file with a checkpoint's origin, the sizes and checksums of its files, and its own checksum.
Checkpoints count as newest in the order of saving. This module imports no torch.
"""

import json
import os
import re
import secrets
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ft.base import bounded_json

TRACKER = "latest_checkpointed_iteration.txt"
HOLDER = "in_use_by.json"
MANIFEST = "manifest.json"
COMMON = "common.pt"

_CHECKPOINT = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"iter_\d{7,}(\.[0-9a-f]+)?\.(partial|removed)")
_PARTIAL = ".partial"
_BLOCK = 1 << 20


class ManifestError(ValueError):
    """Raised if a text is not a manifest, or is a damaged one."""


class FileRecord(msgspec.Struct, frozen=True):
    """Size in bytes and CRC-32 of one file."""

    bytes: int
    crc32: int


class Manifest(msgspec.Struct):
    """The content and origin of a checkpoint.

    Args:
        step: number of steps done when the checkpoint was saved.
        serial: position of the checkpoint in the order of saving in its folder, from 1.
        saved_at: UTC time of the save, ISO 8601.
        layout: sizes of the parallel dimensions of the run that saved it (``world_size``, ``tp``, ``pp``, ...).
        versions: versions of megatron-core and torch.
        optimizer: format of the optimizer state (``fully_reshardable``, ``dp_reshardable`` or ``replicated``, see
            ``content.optimizer_kind``); None: the checkpoint has no optimizer state.
        rng_grid: shape of the grid of random generator states (see ``rng.grid``); None: the checkpoint has none.
        run: the caller's information about the run: ``model``, ``options``, ``fingerprints``.
        files: name in the folder -> size and checksum, for every file except the manifest.
        ckpt_format: ``torch_dist``.
    """

    step: int
    serial: int
    saved_at: str
    layout: dict[str, Any]
    versions: dict[str, str]
    optimizer: str | None
    rng_grid: list[int] | None
    run: dict[str, Any]
    files: dict[str, FileRecord] = {}
    ckpt_format: str = "torch_dist"

    def to_json(self) -> str:
        body = msgspec.to_builtins(self)
        return json.dumps({"checksum": _checksum(body), **body}, indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse what :meth:`to_json` wrote.

        Raises:
            ManifestError: the text is not JSON, not a manifest, or does not match its checksum.
        """
        try:
            body = bounded_json.loads(text, non_finite=True)
            if body.pop("checksum") == _checksum(body):
                return msgspec.convert(body, cls)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ManifestError(f"it is not a manifest: {error}") from error
        raise ManifestError("its own checksum does not match")


def bytes_in_words(count: float) -> str:
    """Format a number of bytes with a binary unit, for example as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _checksum(body: dict) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":"), default=str).encode())


@dataclass(frozen=True)
class Entry:
    """One checkpoint found in a folder.

    Args:
        name: name of its folder.
        step: the training step after which it was saved.
        serial: its position in the order of saving, from 1; None if unknown.
        problem: why it is not complete; None if it is.
    """

    name: str
    step: int
    serial: int | None = None
    problem: str | None = None

    @property
    def complete(self) -> bool:
        return self.problem is None


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint folder of ``step``."""
    return f"iter_{step:07d}"


def partial_name(step: int) -> str:
    """Return a name for a save in progress: a unique one, because a rank that has lost its network connection may still
    be writing an earlier save of the same step.
    """
    return f"{checkpoint_name(step)}.{secrets.token_hex(4)}{_PARTIAL}"


def replaced_name(partial: str) -> str:
    """Return the new name for an existing checkpoint that is replaced by the save in the folder ``partial``."""
    return removed_name(partial.removesuffix(_PARTIAL))


def removed_name(name: str) -> str:
    """Return the name of a folder while it is being removed."""
    return f"{name}.removed"


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint called ``name``; None if that is not a checkpoint's name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match.group(1)) if match else None


def is_leftover(name: str) -> bool:
    """Return whether ``name`` is a folder that only an interrupted save or removal leaves behind."""
    return _LEFTOVER.fullmatch(name) is not None


def newest_first(entries: Collection[Entry]) -> list[Entry]:
    """Return the complete checkpoints, the last saved one first: after a rollback to step 500 of a run that had reached
    1000, the checkpoint of step 600 is the newest.
    """
    return sorted((e for e in entries if e.complete), key=lambda e: (e.serial or 0, e.step), reverse=True)


def newest_complete(entries: Collection[Entry]) -> Entry | None:
    """Return the complete checkpoint that was saved last; None if there is none."""
    return next(iter(newest_first(entries)), None)


def next_serial(entries: Iterable[Entry]) -> int:
    """Return the serial number of the next checkpoint."""
    return 1 + max((e.serial for e in entries if e.serial is not None), default=0)


def to_remove(entries: Collection[Entry], keep_last: int | None, distrusted: Collection[str] = ()) -> list[Entry]:
    """Return the complete checkpoints beyond the newest ``keep_last`` (None keeps all), oldest first.

    Those whose names are in ``distrusted`` failed verification: they do not count as kept, and stay for the user to
    examine.
    """
    if keep_last is None:
        return []
    return [e for e in newest_first(entries) if e.name not in distrusted][max(keep_last, 1) :][::-1]


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
    """Return every checkpoint in ``folder`` in the order of steps. Only the manifests are checked, not the data files.

    Raises:
        OSError: the folder cannot be listed (``may_be_missing``: then it is empty), or a manifest cannot be read.
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
    """Return the names of the files that ``rank`` of ``ranks`` verifies: dealt out in turn, the largest first."""
    return sorted(files, key=lambda name: (-files[name].bytes, name))[rank::ranks]


def problems(checkpoint: Path, files: Mapping[str, FileRecord], names: list[str] | None = None) -> list[str]:
    """Return what is wrong with the files called ``names`` (default: all of ``files``), one line for each bad file."""
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
