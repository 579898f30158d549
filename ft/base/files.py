"""Writes a file whole: who reads it meanwhile sees the old content or the new one."""

import os
from pathlib import Path


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
