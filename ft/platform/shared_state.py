"""What a run keeps where no single node can take it along: leases, claimed terms and names, and the journal.

There are two engines. In the usual run, the values are files in the folder of the run, which all nodes share. With
``ft run --control etcd://...`` they are keys on servers of etcd, and each node has a run folder of its own. A file in
that folder, :data:`POINTER`, says so: every process that is given the folder finds the values (:func:`of`).

Other users may write to the same servers of etcd. So every value there carries a code that only members of the run can
compute; a value without it counts as absent. Whoever can write there can hinder a run, and cannot steer it.
"""

import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.base.lines import Lines

SCHEME = "etcd://"
USER = "ETCDCTL_USER"
"""Environment variable from which etcdctl reads USER:PASSWORD; this keeps the password off the command line."""
_TRY_S = 1.0
"""Limit for one request, in seconds."""
_PAUSE_S = 1.0
"""Seconds without a further request after two servers did not answer: a caller that does other work must not wait for
them again and again.
"""
_FRESH_S = 0.1
"""Age in seconds up to which a list of names is returned again. Who leads is asked with every message, and a newer
leader appears only when a lease has run out, which takes longer.
"""
_READ_S, _AGAIN_S = 30.0, 0.2
"""Time for reading a log, while servers may elect a leader, and pause between two attempts, in seconds."""
_PIECE, _PIECES = 1 << 18, 32
"""Largest value in bytes (etcd refuses 1.5 MB), and number of values in one answer."""
_CODE = hashlib.sha256().digest_size
_PATH = "ft"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Address:
    """The content of an etcd URL.

    Attributes:
        servers: (host, port) of each server.
        path: beginning of all keys, without slashes at its ends.
        user: (name, password), or None.
    """

    servers: tuple[tuple[str, int], ...]
    path: str
    user: tuple[str, str] | None

    @classmethod
    def parse(cls, url: str) -> "Address":
        """Parse ``etcd://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...][/PATH]``; a missing user is read from $ETCDCTL_USER.

        Raises:
            UserError: ``url`` is not valid.
        """
        parts = urlsplit(url)
        login, _, hosts = parts.netloc.rpartition("@")
        try:
            servers = []
            for server in hosts.split(","):
                host, _, port = server.rpartition(":")
                if not host:
                    raise ValueError(f"no HOST:PORT: {server!r}")
                servers.append((host.strip("[]"), int(port)))
        except ValueError as error:
            raise UserError(
                f"{without_password(url)} cannot be read ({error})", "give etcd://HOST:PORT[,HOST:PORT...]"
            ) from error
        name, _, password = (login or os.environ.get(USER, "")).partition(":")
        user = ((unquote(name), unquote(password)) if login else (name, password)) if name else None
        return cls(tuple(servers), parts.path.strip("/") or _PATH, user)

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.servers)


def without_password(url: str) -> str:
    """Return ``url`` with its password replaced by asterisks, for messages."""
    head, at, tail = url.rpartition("@")
    return f"{SCHEME}{head.removeprefix(SCHEME).partition(':')[0]}:***@{tail}" if at else url


def require(url: str) -> None:
    """See that an address is valid and that the client library is installed.

    Raises:
        UserError: it is not.
    """
    Address.parse(url)
    if find_spec("etcd3gw") is None:
        problem = f"{without_password(url)} needs the package etcd3gw, which is not installed"
        raise UserError(problem, "pip install 'megatron-ft[etcd]'")


class Etcd:
    """The values as keys below ``PATH/RUN-CODE/``, with the methods of ``ft.platform.shared_state.SharedState``.

    The code differs for each token of a run.

    Args:
        url: address of the servers, see :meth:`Address.parse`.
        key: secret of the run from which the codes of the values are computed.
        run: name of the run, or of a part of it.
        folder: the run's folder on this node, for a copy of each log that this process writes.

    Raises:
        UserError: the address is not valid, or the client library is not installed.
    """

    def __init__(self, url: str, key: bytes, run: str, folder: Path):
        require(url)
        from etcd3gw.client import Etcd3Client
        from etcd3gw.exceptions import Etcd3Exception

        self._connect, self._errors = Etcd3Client, (Etcd3Exception, OSError, ValueError, KeyError)
        self._address = Address.parse(url)
        name, slash, part = run.partition("/")
        code = hashlib.sha256(key).hexdigest()[:8]
        self._key, self._root, self._folder = key, f"{self._address.path}/{name}-{code}{slash}{part}", folder
        self._clients = threading.local()
        self._turn, self._silent_until, self._problem = 0, 0.0, ""
        self._known: dict[str, tuple[float, list[str]]] = {}

    @property
    def root(self) -> str:
        """Return what all keys of the run begin with."""
        return f"{self._root}/"

    def check(self) -> None:
        """See that etcd answers.

        Raises:
            UserError: it does not, or refuses the user.
        """
        deadline = time.monotonic() + _READ_S
        while True:
            try:
                self.get("any")
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    fix = f"start it, or correct --control; USER:PASSWORD are read from ${USER}"
                    raise UserError(f"{error}", fix) from error
                time.sleep(_AGAIN_S)

    def get(self, name: str) -> bytes | None:
        key = self._path(name)
        found = self._call(lambda client: client.get(key))
        return self._authentic(name, found[0]) if found else None

    def put(self, name: str, value: bytes) -> None:
        sealed = self._sealed(name, value)
        self._call(lambda client: client.put(self._path(name), sealed))

    def create(self, name: str, value: bytes) -> bool:
        sealed = self._sealed(name, value)
        self._known.pop(name.rpartition("/")[0], None)
        return bool(self._call(lambda client: client.create(self._path(name), sealed)))

    def names(self, under: str) -> list[str]:
        at, known = self._known.get(under, (float("-inf"), []))
        if time.monotonic() - at > _FRESH_S:
            began = time.monotonic()
            known = [name for name, _ in self._below(f"{under}/")]
            self._known[under] = began, known
        return known

    def log(self, name: str) -> "_EtcdLog":
        content = self.read_log(name)
        files.replace(self._folder / name, content)
        return _EtcdLog(self, name, content, Lines(self._folder / name, most=None))

    def read_log(self, name: str) -> bytes:
        deadline = time.monotonic() + _READ_S
        while True:
            try:
                return b"".join(value for _, value in self._below(f"{name}/"))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_AGAIN_S)

    def _below(self, under: str) -> list[tuple[str, bytes]]:
        """Return (name without ``under``, value) of each value whose name begins with it, in the order of names."""
        first, found = self._path(under), []
        how = {"sort_order": "ascend", "sort_target": "key", "limit": _PIECES}
        how["range_end"] = f"{first[:-1]}0"  # the character after the slash
        start: str | bytes = first
        while True:
            page = self._call(lambda client, start=start: client.get(start, metadata=True, **how))
            for data, about in page:
                name = about["key"].decode(errors="replace").removeprefix(first)
                if (value := self._authentic(under + name, data)) is not None:
                    found.append((name, value))
            if len(page) < _PIECES:
                return found
            start = page[-1][1]["key"] + b"\0"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _sealed(self, name: str, value: bytes) -> bytes:
        return hmac.digest(self._key, self._path(name).encode() + b"\0" + value, "sha256") + value

    def _authentic(self, name: str, data: bytes) -> bytes | None:
        """Return the value in ``data``, which was read under ``name``; None if no member of the run has written it."""
        value = data[_CODE:]
        return value if hmac.compare_digest(self._sealed(name, value), data) else None

    def _call(self, what: Callable[[Any], _T]) -> _T:
        """Return ``what(client)``; another server is asked if one does not answer.

        Raises:
            OSError: two servers have not answered, now or a moment ago.
        """
        if time.monotonic() >= self._silent_until:
            for _ in range(2):
                try:
                    return what(self._client())
                except self._errors as error:
                    self._problem = _reason(error)
                    self._turn += 1
            self._silent_until = time.monotonic() + _PAUSE_S
        raise OSError(f"etcd at {self._address} does not answer: {self._problem}")

    def _client(self) -> Any:
        """Return this thread's client of the server whose turn it is."""
        turn = self._turn
        if getattr(self._clients, "turn", None) != turn:
            host, port = self._address.servers[turn % len(self._address.servers)]
            client = self._connect(host, port, timeout=_TRY_S, api_path="/v3/")
            client.session.trust_env = False  # no proxy, and no password from ~/.netrc
            if self._address.user is not None:
                name, password = self._address.user
                asked = {"name": name, "password": password}
                answer = client.post(client.get_url("/auth/authenticate"), json=asked)
                client.session.headers["Authorization"] = answer["token"]
            self._clients.client, self._clients.turn = client, turn
        return self._clients.client


def _reason(error: Exception) -> str:
    return str(getattr(error, "detail_text", "") or error or type(error).__name__)[:200]


class _EtcdLog:
    """A log in pieces; the name of each piece is the number of bytes before it, so that no two writers use the same."""

    def __init__(self, etcd: Etcd, name: str, content: bytes, copy: Lines):
        self._etcd, self._name, self._copy = etcd, name, copy
        self.size = self._end = len(content)
        self._waiting: deque[bytes] = deque()
        self._is_held_up = False
        if content and not content.endswith(b"\n"):  # its writer died between two pieces of a line
            self._waiting.append(b"\n")

    def write(self, *lines: bytes) -> None:
        self._copy.write(*lines)
        data = b"".join(lines)
        self._waiting.extend(data[at : at + _PIECE] for at in range(0, len(data), _PIECE))
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
            self._is_held_up = False
        except OSError as error:
            if not self._is_held_up:
                print(f"warning: {self._name}: {error}; its lines wait in memory", file=sys.stderr, flush=True)
            self._is_held_up = True

    def close(self) -> None:
        self.write()
        self._copy.close()

    def _append(self, piece: bytes) -> None:
        """Write a piece at the end of the log, once, even if an earlier attempt was carried out without an answer."""
        there = None
        while there != piece:
            name = f"{self._name}/{self._end:020d}"
            there = piece if self._etcd.create(name, piece) else self._etcd.get(name)
            if there is None:  # a stranger's value
                self._etcd.put(name, there := piece)
            self._end += len(there)


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
            with open(temporary, "wb", opener=files.open_no_link) as file:
                file.write(value)
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
