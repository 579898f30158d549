"""A small file system that a test can fill, and that has room again when the test wants it to."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str, files: int = 0) -> Iterator[Path]:
    """Mount a file system in memory at ``folder``; skip the test where that is not allowed.

    Args:
        folder: mount point, which is made.
        size: its size, as tmpfs takes it.
        files: its number of files, 0: as many as there is room for.
    """
    folder.mkdir()
    options = f"size={size}" + (f",nr_inodes={files}" if files else "")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, files: bool = True) -> None:
    """Take all of the room on a small disk, and unless ``files`` is False the last file, too."""
    (disk / "ballast").mkdir()
    with contextlib.suppress(OSError), open(disk / "ballast" / "bytes", "wb", buffering=0) as ballast:
        while ballast.write(bytes(4096)):
            pass
    with contextlib.suppress(OSError):
        for number in range(10_000 if files else 0):
            (disk / "ballast" / str(number)).touch()


def make_room(disk: Path) -> None:
    """Undo ``fill``."""
    for file in (disk / "ballast").iterdir():
        file.unlink()
    (disk / "ballast").rmdir()
