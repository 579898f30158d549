"""What a run keeps where no single node can take it along: leases, claimed terms and names, and the journal.

There are two engines. In the usual run, the values are files in the run's folder, which all nodes share. With
``ft run --control etcd://...`` they are keys on servers of etcd, and each node has a run folder of its own. A file in
that folder, :data:`POINTER`, says so: every process that is given the folder finds the values (:func:`of`).
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ft.base import bounded_json, files
from ft.base.lines import Lines

if TYPE_CHECKING:
    from ft.platform.etcd import Etcd

POINTER = "etcd.json"
"""File in a run's folder: the values of this run are on servers of etcd."""
_LEVELS = 3
"""A folder itself, its parent and the parent's parent: leases of places are two levels below the run's folder."""


class Log(Protocol):
    """An append-only sequence of lines, open for writing.

    Attributes:
        size: number of bytes in it when it was opened.
    """

    size: int

    def write(self, *lines: bytes) -> None:
        """Append lines, each ending with a newline. Lines that cannot be written wait in memory for the next call."""

    def close(self) -> None:
        """Write the waiting lines as far as that is possible."""


class SharedState(Protocol):
    """Values by name, which processes of all nodes read and write.

    All methods raise ``OSError`` if the values cannot be read or written now.
    """

    def get(self, name: str) -> bytes | None:
        """Return a value, None if there is none."""

    def put(self, name: str, value: bytes) -> None:
        """Write a value, atomically: readers see the old or the new one."""

    def create(self, name: str, value: bytes) -> bool:
        """Write a value unless there is one; return whether it was written. Of several processes one succeeds."""

    def names(self, under: str) -> list[str]:
        """Return the names that begin with ``under/``, without that."""

    def log(self, name: str) -> Log:
        """Open a log for writing. Another process may still append to it."""

    def read_log(self, name: str) -> bytes:
        """Return the content of a log, empty if there is none."""


class Folder(SharedState):
    """The values as files of a folder that all nodes share."""

    def __init__(self, path: Path):
        self._path = path

    def get(self, name: str) -> bytes | None:
        try:
            return files.read(self._path / name)
        except FileNotFoundError:
            return None

    def put(self, name: str, value: bytes) -> None:
        """See the base class.

        On a full disk, which has no room for another file, an existing file is written over in place: a leader that
        could not renew its lease would be replaced.
        """
        path = self._path / name
        temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(value)
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_over(path, value):
                raise

    def create(self, name: str, value: bytes) -> bool:
        """See the base class. The file counts: on a disk without room for its content it is empty."""
        path = self._path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        draft.touch()
        try:
            with contextlib.suppress(OSError):
                draft.write_bytes(value)
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def names(self, under: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._path / under) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def log(self, name: str) -> Log:
        # A missing line would change the meaning of those after it, so none is ever dropped.
        return Lines(self._path / name, most=None, is_shared=True)

    def read_log(self, name: str) -> bytes:
        try:
            return files.read(self._path / name, files.UNLIMITED)
        except FileNotFoundError:
            return b""


def _write_over(path: Path, value: bytes) -> bool:
    """Replace the content of a file that exists, padded to its size, in one write; return whether that was possible."""
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        data = value.ljust(os.fstat(file.fileno()).st_size)
        return file.write(data) == len(data)
    return False


def of(folder: Path) -> SharedState:
    """Return the values of the run, or the part of a run, with this folder.

    Raises:
        UserError: they are in etcd, and its client library is not installed.
    """
    parts: list[str] = []
    place = folder
    for _ in range(_LEVELS):
        with contextlib.suppress(OSError):
            return _on_etcd(files.read_text(place / POINTER), folder, "/".join(reversed(parts)))
        parts.append(place.name)
        place = place.parent
    return Folder(folder)


@functools.lru_cache
def _on_etcd(pointer: str, folder: Path, part: str) -> "Etcd":
    from ft.platform.etcd import Etcd

    found = bounded_json.loads(pointer)
    return Etcd(found["url"], bytes.fromhex(found["key"]), "/".join(filter(None, (found["run"], part))), folder)


def keep_on_etcd(folder: Path, url: str, run: str, token: str) -> str:
    """Keep the values of the run with this folder on servers of etcd, and see that they answer.

    Args:
        url: ``etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/PATH]``.
        run: name of the run, the same on all its nodes, and another one for each run.
        token: secret of the run, which authenticates its values.

    Returns:
        What all keys of the run begin with.

    Raises:
        OSError: the folder cannot be written.
        UserError: etcd does not answer, or its client library is not installed.
    """
    key = hashlib.sha256(f"values in etcd {token}".encode()).hexdigest()
    path = folder / POINTER
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
        json.dump({"url": url, "run": run, "key": key}, file)
    etcd = _on_etcd(path.read_text(), folder, "")
    etcd.check()
    return etcd.root
