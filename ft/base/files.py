"""Writes a file whole: who reads it meanwhile sees the old content or the new one."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ft.base.errors import UserError


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
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


@contextlib.contextmanager
def needs_run_dir(run_dir: Path) -> Iterator[None]:
    """In this context, an OSError means that a run cannot start because its directory cannot be written.

    Raises:
        UserError: instead of an OSError.
    """
    try:
        yield
    except OSError as error:
        problem = f"the run's directory {run_dir} cannot be written: {error.strerror or error}"
        raise UserError(problem, "make room there, or choose another --run-dir") from error


def replace_all(contents: Mapping[Path, str | bytes]) -> tuple[list[Path], str]:
    """Write files atomically, as many as possible; return (those that were written, why the others were not or "")."""
    written, problem = [], ""
    for path, content in contents.items():
        try:
            replace(path, content)
            written.append(path)
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror or error}"
    return written, problem
