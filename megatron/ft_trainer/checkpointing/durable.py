"""File operations that are atomic with respect to crashes: each is either complete and on disk, or not done at all."""

import ctypes
import os
import shutil
from pathlib import Path

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def fsync_folder(folder: Path) -> None:
    """Write the folder's entries (names, renames, removals) to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write ``path`` and wait for the disk. This is not atomic: use it in folders that have no readers yet."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def replace_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text``, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    write_text(temporary, text)
    os.replace(temporary, path)
    fsync_folder(path.parent)


def move_folder(source: Path, target: Path, aside: Path) -> None:
    """Rename ``source`` to ``target``. A folder that exists there already is moved to ``aside``.

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
