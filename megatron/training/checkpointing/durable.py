"""File operations that survive a crash: each is either done and on the disk, or not done at all."""

import ctypes
import os
import shutil
from pathlib import Path

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def fsync_folder(folder: Path) -> None:
    """Puts the folder's entries (names, renames, removals) on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes ``path`` and waits for the disk; not atomic: for folders that nobody reads yet."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_text(path: Path, text: str) -> None:
    """Atomically makes ``text`` the content of ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_text(temporary, text)
    os.replace(temporary, path)
    fsync_folder(path.parent)


def move_folder(source: Path, target: Path, aside: Path) -> None:
    """Renames ``source`` to ``target``; a folder that is there already ends up at ``aside``.

    Where the file system can swap two names at once there is no moment without a ``target``.
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
    """Removes ``folder``; the name is gone at once, so that a half-removed folder never carries it."""
    if folder != aside:
        os.rename(folder, aside)
        fsync_folder(folder.parent)
    shutil.rmtree(aside)


def _swap(a: Path, b: Path) -> bool:
    """Exchanges two names; False where kernel, C library or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_RENAME_EXCHANGE))
    return done == 0
