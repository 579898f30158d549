"""Reads files of unknown origin within bounds, and writes a file whole: readers see the old content or the new one."""

import contextlib
import errno
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ft.base import bounded_json
from ft.base.errors import UserError

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


def why_unsafe(folder: Path) -> str:
    """Return why others could change what this process writes into a folder; "" if none could, or it does not exist.

    A folder whose group can write is accepted: with the usual settings, the group is the user's own.
    """
    user = os.geteuid()
    for path in (folder, *folder.absolute().parents):
        if path.is_symlink() and path.lstat().st_uid not in (0, user):
            return f"{path} is a link of another user"
    for part in (folder, folder / "logs"):
        try:
            found = part.stat()
        except FileNotFoundError:
            continue
        if found.st_uid != user:
            return f"{part} belongs to the user {found.st_uid}"
        if found.st_mode & stat.S_IWOTH:
            return f"every user can write to {part}"
        if links := [entry.path for entry in os.scandir(part) if entry.is_symlink()]:
            return f"{min(links)} is a link"
    return ""


def open_no_link(path: str | Path, flags: int, mode: int = 0o644) -> int:
    """Open a file that this run writes, for ``open(..., opener=open_no_link)``: a link in its place is an OSError."""
    return os.open(path, flags | os.O_NOFOLLOW, mode)


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
        with open(temporary, "wb", opener=open_no_link) as file:
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


def read_structured(path: str | Path, noun: str) -> Any:
    """Parse a YAML, TOML or JSON file and return its values. The suffix of the file's name decides on the format.

    Args:
        path: the file; any suffix but .yaml, .yml and .toml means JSON.

    Raises:
        UserError: the file cannot be read or parsed.
    """
    path = Path(path)
    name, parse = _FORMATS.get(path.suffix.lower(), ("JSON", bounded_json.loads))
    try:
        value = parse(read_text(path))
        bounded_json.check(value)
        return value
    except OSError as error:
        raise UserError(f"{noun} {path} cannot be read: {error}", "give a readable file") from error
    except (ValueError, RecursionError) as error:  # also raised for bytes that are not valid text
        fix = "correct the file; its format follows from the suffix: .yaml, .yml, .toml or .json"
        raise UserError(f"{noun} {path} is not {name}: {error}", fix) from error


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


_FORMATS = {".toml": ("TOML", tomllib.loads), ".yaml": ("YAML", _read_yaml), ".yml": ("YAML", _read_yaml)}
