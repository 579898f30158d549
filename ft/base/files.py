"""Reads files of unknown origin within bounds, and writes a file whole: readers see the old content or the new one."""

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 256 << 20
"""Size of the largest file of unknown origin that is read as a whole, in bytes."""
_PIECE = 16 << 20
UNLIMITED = 1 << 60
"""For files of a run that grow with it."""


def read(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file or a pipe.

    A device such as /dev/zero has no end, and to open a pipe that nobody writes to would wait for ever: the first is
    refused, the second is empty.

    Args:
        path: the file.
        most: largest size that is accepted, in bytes.

    Raises:
        OSError: the file cannot be read, is no regular file and no pipe, or is larger than ``most``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        os.set_blocking(descriptor, True)
        content = bytearray()
        while piece := file.read(_PIECE):
            content += piece
            if len(content) > most:
                raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return bytes(content)


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Return the content of a file or a pipe as text; see :func:`read`.

    Raises:
        OSError: as for :func:`read`.
        UnicodeDecodeError: the content is not UTF-8.
    """
    return read(path, most).decode()


def replace(path: Path, content: str | bytes, durable: bool = False) -> None:
    """Write a file atomically. Several writers at once must exclude each other.

    Args:
        path: the file, in a folder that exists.
        content: its new content; text is encoded as UTF-8.
        durable: whether to wait until the content has reached the disk.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
