"""Rank 0's part of a save: preparing the folder, committing the checkpoint atomically, removing old ones.

The file operations at the end are atomic with respect to crashes: each is either complete and on disk, or not done.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from ft.base import files
from ft.base.errors import UserError
from ft.job.replicas.host import FOLDER as LAUNCHERS
from ft.platform import election, shared_state
from megatron.ft_trainer.checkpointing import inventory
from megatron.ft_trainer.checkpointing.inventory import Manifest, bytes_in_words, scan

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "the file is too big"}


def explain(error: OSError, path: Path) -> str:
    """Describe ``error`` in words, with the number of free bytes if a lack of them may be the cause."""
    what = _FULL.get(error.errno, error.strerror or str(error))
    text = f"{error.filename or path}: {what}"
    if error.errno in _FULL:
        with contextlib.suppress(OSError):
            text += f" ({bytes_in_words(shutil.disk_usage(path.parent).free)} free on that file system)"
    return text


def take(folder: Path, environment: Mapping[str, str]) -> None:
    """Create the folder if necessary, check that files can be created in it, and record that this run saves into it.

    The record says which ``ft run`` this worker belongs to; outside ``ft run`` there is none.

    Raises:
        UserError: ``folder`` is a file, permissions or the file system forbid writing, or another run that is under
            way saves into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
        run = environment.get("FT_HSDP_RUN_DIR") or environment.get("FT_RUN_DIR")
        if run is not None:
            _occupy(folder, run)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"--save {folder}: a file is where the folder should be", "give another folder") from error
    except OSError as error:
        raise UserError(f"--save: {explain(error, folder)}", "give a folder that this user can write to") from error


def _occupy(folder: Path, run: str) -> None:
    path, mine = folder / inventory.HOLDER, election.holder(os.getppid(), Path(run))
    shared_state.Folder(folder).create(inventory.HOLDER, mine.encode())
    other = election.read_holder(path)
    if other is not None and _is_same(other.run, run):
        return
    if other is not None and election.is_at_work(other, [Path(other.run), Path(other.run) / LAUNCHERS]):
        raise UserError(
            f"--save {folder} is in use by the run {other.run} ({other})", "give another --save, or end that run"
        )
    election.write_holder(path, mine)


def _is_same(folder: str, other: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(folder, other)
    return folder == other


def prepare(folder: Path, step: int) -> tuple[str, int, str | None]:
    """Remove the remains of interrupted saves and removals, and make the folder to write the next one into.

    Workers that a recovery has replaced may still be writing an earlier save. The folder of that save is removed here,
    so that it cannot be committed or mixed with the new one. What they prevent from being removed, a later save
    removes.

    Returns:
        the new folder's name, the serial number of the checkpoint, and None, or why there is no such folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in os.listdir(folder):
            if inventory.is_leftover(name):
                shutil.rmtree(folder / name, ignore_errors=True)
        partial = inventory.partial_name(step)
        (folder / partial).mkdir()
        return partial, inventory.next_serial(scan(folder)), None
    except OSError as error:
        return "", 0, f"rank 0: {explain(error, folder)}"


def commit(
    partial: Path, manifest: Manifest, keep_last: int | None, distrusted: Collection[str]
) -> tuple[str | None, list[str]]:
    """Turn the partial folder, whose files are on disk, into a checkpoint by renaming it last.

    Until then no existing checkpoint is affected. Then write the newest checkpoint's step into the tracker file, which
    Megatron's tools need, and the loader here does not, and remove checkpoints that are not to be kept.

    Args:
        partial: the folder; it is removed if it cannot become a checkpoint.
        manifest: its manifest.
        keep_last, distrusted: as for :func:`inventory.to_remove`.

    Returns:
        why there is no checkpoint, or None; the errors that do not harm it.
    """
    folder = partial.parent
    try:
        files.replace(partial / inventory.MANIFEST, manifest.to_json(), durable=True)
        fsync_folder(partial)
        target = folder / inventory.checkpoint_name(manifest.step)
        move_folder(partial, target, folder / inventory.replaced_name(partial.name))
    except OSError as error:
        discard(partial)
        return explain(error, partial), []
    try:
        files.replace(folder / inventory.TRACKER, f"{manifest.step}\n", durable=True)
        fsync_folder(folder)
        return None, retire(folder, keep_last, distrusted)
    except OSError as error:
        return None, [explain(error, folder)]


def discard(partial: Path) -> None:
    """Remove the partial folder of a failed save. If the removal fails, the next save repeats it."""
    shutil.rmtree(partial, ignore_errors=True)


def retire(folder: Path, keep_last: int | None, distrusted: Collection[str]) -> list[str]:
    """Remove checkpoints that were replaced or are not to be kept (``inventory.to_remove``).

    Return one text for each failed removal.
    """
    failures = []
    for name in [n for n in os.listdir(folder) if n.endswith(".removed")]:
        with contextlib.suppress(OSError):
            remove_folder(folder / name, folder / name)
    for entry in inventory.to_remove(scan(folder), keep_last, distrusted):
        try:
            remove_folder(folder / entry.name, folder / inventory.removed_name(entry.name))
        except OSError as error:
            failures.append(f"could not remove {explain(error, folder / entry.name)}")
    return failures


_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def fsync_folder(folder: Path) -> None:
    """Write the folder's entries (names, renames, removals) to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_folder(source: Path, target: Path, aside: Path) -> None:
    """Rename ``source`` to ``target``, and a folder that exists there already to ``aside``.

    If the file system can exchange two names atomically, ``target`` exists at every moment.
    """
    if not target.exists():
        os.rename(source, target)
    elif _swap(source, target):
        os.rename(source, aside)
    else:
        os.rename(target, aside)
        os.rename(source, target)
    fsync_folder(target.parent)


def remove_folder(folder: Path, aside: Path) -> None:
    """Remove ``folder``. It is renamed first, so that a partly removed folder never has its name."""
    if folder != aside:
        os.rename(folder, aside)
        fsync_folder(folder.parent)
    shutil.rmtree(aside)


def _swap(a: Path, b: Path) -> bool:
    """Exchange two names. Return False if kernel, C library or file system cannot do so."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE))
    return done == 0
