"""Writes one rank's files with checksums and fsync, in this process or in a forked one."""

import ctypes
import errno
import gc
import io
import json
import os
import signal
import sys
import traceback
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ft.base import bounded_json

_BUFFER = 1 << 20
_PR_SET_PDEATHSIG = 1
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EFBIG: "the file is too big"}


@dataclass
class OutputFile:
    """A file to write.

    Args:
        name: name of the file in the checkpoint's folder.
        parts: pairs (index, data) in the order of writing. The index (a JSON value) identifies the part in the report.
            Data that is a BytesIO is written as it is, any other data with ``torch.save``.
    """

    name: str
    parts: list[tuple[Any, Any]]


class _ChecksummedFile:
    """The part of a file object that ``torch.save`` needs. It counts the bytes and computes their CRC-32."""

    def __init__(self, stream: io.BufferedWriter):
        self._stream = stream
        self.bytes = 0
        self.crc32 = 0

    def write(self, data) -> int:
        count = memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        self._stream.write(data)
        self.bytes += count
        return count

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """Do nothing: ``torch.save`` calls this after each tensor, but the file is flushed once, at its end."""


def write(folder: Path, files: list[OutputFile]) -> dict:
    """Write and fsync ``files``, and return a JSON report. Never raises.

    Returns:
        ``{"files": [{"name", "bytes", "crc32", "parts": [[index, offset, length], ...]}, ...]}``, or ``{"error":
            message}`` that names the file and, if space is short, the number of free bytes.
    """
    reports = []
    for file in files:
        path = folder / file.name
        try:
            reports.append({"name": file.name, **_write_file(path, file.parts)})
        except OSError as error:
            return {"error": explain(error, path)}
        except Exception as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else None
            if cause is not None:
                return {"error": explain(cause, path)}
            return {"error": f"{path}: {type(error).__name__}: {error}"}
    return {"files": reports}


def explain(error: OSError, path: Path) -> str:
    """Describe ``error`` in words, with the number of free bytes if a lack of them may be the cause."""
    what = _FULL.get(error.errno, error.strerror or str(error))
    text = f"{error.filename or path}: {what}"
    if error.errno in _FULL:
        text += f" ({bytes_in_words(free_bytes(path.parent))} free on that file system)"
    return text


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that an unprivileged user can still write into ``folder``; 0 if unknown."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def bytes_in_words(count: float) -> str:
    """Format a number of bytes with a binary unit, for example as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _write_file(path: Path, parts: list[tuple[Any, Any]]) -> dict:
    places = []
    with open(path, "wb", buffering=_BUFFER) as stream:
        out = _ChecksummedFile(stream)
        for index, data in parts:
            start = out.tell()
            if isinstance(data, io.BytesIO):
                out.write(data.getbuffer())
            else:
                torch.save(_own_storage(data), out)
            places.append([index, start, out.tell() - start])
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": out.bytes, "crc32": out.crc32, "parts": places}


def _own_storage(data: Any) -> Any:
    """Return ``data`` as a tensor that owns its whole storage: ``torch.save`` writes storages, not views."""
    if isinstance(data, torch.Tensor) and data.untyped_storage().size() != data.numel() * data.itemsize:
        return data.clone()
    return data


class Writer(Protocol):
    """The writing of a rank's files, in progress or done.

    Attributes:
        report: the result of :func:`write` when the writing is done, None before.
    """

    report: dict | None

    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def kill(self) -> None:
        """Stop writing at once. Data written so far stays."""


class InlineWriter:
    """Writes at once, in this process."""

    def __init__(self, folder: Path, files: list[OutputFile]):
        self.report = write(folder, files)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def kill(self) -> None:
        pass


class ForkedWriter:
    """Writes in a forked process, which sees the tensors as they were at the fork, whatever training does to them.

    This holds for private memory, which all CPU tensors have unless ``share_memory_`` was called on them; tensors on
    another device have to be copied to the host before. The process keeps none of its parent's sockets and pipes except
    stdout and stderr, and dies with its parent.
    """

    def __init__(self, folder: Path, files: list[OutputFile]):
        self.report: dict | None = None
        self._received = b""
        try:
            self._fork(folder, files)
        except OSError as error:
            self.report = {"error": f"no process to write the checkpoint: {error.strerror}"}

    def _fork(self, folder: Path, files: list[OutputFile]) -> None:
        self._pipe, into = os.pipe()
        os.set_blocking(self._pipe, False)
        _flush_output()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns of forks in processes with threads. The child takes no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            _child(parent, into, folder, files)
        os.close(into)

    def done(self) -> bool:
        while self.report is None:
            try:
                data = os.read(self._pipe, _BUFFER)
            except BlockingIOError:
                return False
            if data:
                self._received += data
            else:
                self._reap()
        return True

    def wait(self) -> None:
        if self.report is None:
            os.set_blocking(self._pipe, True)
            self.done()

    def kill(self) -> None:
        if self.report is None:
            os.kill(self._pid, signal.SIGKILL)
            self.wait()

    def _reap(self) -> None:
        os.close(self._pipe)
        _, status = os.waitpid(self._pid, 0)
        try:
            self.report = bounded_json.loads(self._received, non_finite=True)
        except ValueError:
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            self.report = {"error": f"the process that writes the checkpoint {how}"}


# Loaded before any fork, because the dynamic loader takes locks.
_libc = ctypes.CDLL(None)


def _child(parent: int, into: int, folder: Path, files: list[OutputFile]) -> None:
    """Run the forked process to its end."""
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        # A scheduler signals every process of a job, and the parent decides how to react.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(3, into)
        os.closerange(max(into + 1, 3), os.sysconf("SC_OPEN_MAX"))
        # Garbage collection could free a tensor of another device; OpenMP's threads did not survive the fork.
        gc.disable()
        torch.set_num_threads(1)
        os.nice(5)
        data = memoryview(json.dumps(write(folder, files)).encode())
        while data:
            data = data[os.write(into, data) :]
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        _flush_output()
    finally:
        os._exit(status)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
