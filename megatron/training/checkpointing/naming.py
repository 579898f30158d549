"""Names in a checkpoint folder, and which checkpoint is the newest, which are too many: decisions without I/O.

::

    <save>/latest_checkpointed_iteration.txt      what Megatron's tools read first
    <save>/iter_0000100/                          a checkpoint: complete, for it got this name last of all
    <save>/iter_0000200.4f0c91d2.partial/         a save under way, or the remains of one that died
    <save>/iter_0000050.removed/                  a checkpoint on its way out
    <save>/iter_0000200.4f0c91d2.removed/         one whose place another save of the same step has taken
"""

import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"

_CHECKPOINT = re.compile(r"iter_(\d{7,})")
_LEFTOVER = re.compile(r"iter_\d{7,}(\.[0-9a-f]+)?\.(partial|removed)")
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Entry:
    """One checkpoint found in a folder.

    Args:
        name: its folder's name.
        step: the training step it was taken after.
        serial: its place in the order of saving, from 1; None if it cannot be told.
        problem: why it is no complete checkpoint, or None.
    """

    name: str
    step: int
    serial: int | None = None
    problem: str | None = None

    @property
    def complete(self) -> bool:
        return self.problem is None


def checkpoint_name(step: int) -> str:
    return f"iter_{step:07d}"


def partial_name(step: int) -> str:
    """Never the same twice: a rank that a network has cut off may still be writing what others save once more."""
    return f"{checkpoint_name(step)}.{secrets.token_hex(4)}{_PARTIAL}"


def replaced_name(partial: str) -> str:
    """What the checkpoint is called whose place the save called ``partial`` takes."""
    return removed_name(partial.removesuffix(_PARTIAL))


def removed_name(name: str) -> str:
    return f"{name}.removed"


def step_of(name: str) -> int | None:
    """The step of the checkpoint called ``name``; None if that is no checkpoint's name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match.group(1)) if match else None


def is_leftover(name: str) -> bool:
    """Whether ``name`` is a folder that only an interrupted save or removal leaves behind."""
    return _LEFTOVER.fullmatch(name) is not None


def newest_first(entries: Iterable[Entry]) -> list[Entry]:
    """The complete checkpoints, the one saved last first.

    The order is that of saving, not of steps: after a rollback to step 500 of a run that had reached 1000, the
    checkpoint of step 600 is the newest.
    """
    return sorted((e for e in entries if e.complete), key=lambda e: (e.serial, e.step), reverse=True)


def newest_complete(entries: Iterable[Entry]) -> Entry | None:
    return next(iter(newest_first(entries)), None)


def next_serial(entries: Iterable[Entry]) -> int:
    return 1 + max((e.serial for e in entries if e.serial is not None), default=0)


def to_remove(entries: Iterable[Entry], keep_last: int | None, distrusted: Collection[str] = ()) -> list[Entry]:
    """The complete checkpoints beyond the ``keep_last`` newest, oldest first.

    Args:
        keep_last: how many stay; None keeps all.
        distrusted: names of checkpoints that failed verification: they do not count as kept, and they stay,
            for whoever wants to know what happened to them.
    """
    if keep_last is None:
        return []
    trusted = [e for e in newest_first(entries) if e.name not in distrusted]
    return trusted[max(keep_last, 1) :][::-1]
