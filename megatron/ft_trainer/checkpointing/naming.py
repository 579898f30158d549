"""Names of files and folders in a checkpoint folder, and the order in which checkpoints count as newest. No I/O.

::

    <save>/latest_checkpointed_iteration.txt      what Megatron's tools read first
    <save>/iter_0000100/                          a complete checkpoint: it gets this name last
    <save>/iter_0000200.4f0c91d2.partial/         a save in progress, or the remains of an interrupted one
    <save>/in_use_by.json                         the ``ft run`` that saves here
    <save>/iter_0000050.removed/                  a checkpoint that is being removed
    <save>/iter_0000200.4f0c91d2.removed/         a checkpoint that another save of the same step has replaced
"""

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass

TRACKER = "latest_checkpointed_iteration.txt"
HOLDER = "in_use_by.json"
MANIFEST = "manifest.json"
COMMON = "common.pt"

_CHECKPOINT = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"iter_\d{7,}(\.[0-9a-f]+)?\.(partial|removed)")
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Entry:
    """One checkpoint found in a folder.

    Args:
        name: name of the checkpoint's folder.
        step: the training step after which it was saved.
        serial: the checkpoint's position in the order of saving, from 1; None if unknown.
        problem: why the checkpoint is not complete; None if it is.
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
    """Return a unique name for a save in progress.

    It has to be unique because a rank that has lost its network connection may still be writing an earlier save of the
    same step.
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
    """Return the complete checkpoints, the last saved one first.

    The order is that of saving, not of steps: after a rollback to step 500 of a run that had reached 1000, the
    checkpoint of step 600 is the newest.
    """
    return sorted((e for e in entries if e.complete), key=lambda e: (e.serial or 0, e.step), reverse=True)


def newest_complete(entries: Collection[Entry]) -> Entry | None:
    """Return the complete checkpoint that was saved last; None if there is none."""
    return next(iter(newest_first(entries)), None)


def next_serial(entries: Iterable[Entry]) -> int:
    """Return the serial number of the next checkpoint."""
    return 1 + max((e.serial for e in entries if e.serial is not None), default=0)


def to_remove(entries: Collection[Entry], keep_last: int | None, distrusted: Collection[str] = ()) -> list[Entry]:
    """Return the complete checkpoints that are not to be kept, oldest first.

    Args:
        entries: the checkpoints in a folder.
        keep_last: how many to keep, the newest; None keeps all.
        distrusted: names of checkpoints that failed verification: they do not count as kept, and they are not removed,
            so that the user can examine them.
    """
    if keep_last is None:
        return []
    return [e for e in newest_first(entries) if e.name not in distrusted][max(keep_last, 1) :][::-1]
