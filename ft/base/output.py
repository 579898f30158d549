"""Standard output and standard error that lose text, and count it, where a write would otherwise end the process.

A full disk, an exceeded quota, a failing disk and a pipe without a reader are no reason to end a training run. All
processes of ``ft run`` write through such streams; what was lost is said once, as soon as text is accepted again.
"""

import errno
import io
import os
import select
import sys
from typing import TextIO

_LOSSES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE}


class LossyFile(io.FileIO):
    """An open descriptor. Text that its disk or pipe does not accept is dropped and counted; other errors are raised.

    Attributes:
        lost: number of lines that were dropped and of which nothing was said yet.
        why: the operating system's reason for the last loss.
    """

    lost = 0
    why = ""
    _is_in_line = False

    def write(self, data) -> int:
        try:
            if self.lost:
                note = f"{chr(10) * self._is_in_line}ft: {_loss(self.lost, 'here', self.why)}\n".encode()
                if self._put(note) < len(note):
                    return self._drop(data, self.why)
                self.lost = 0
            return self._put(data)
        except OSError as error:
            if error.errno not in _LOSSES:
                raise
            return self._drop(data, error.strerror)

    def _put(self, data) -> int:
        while (written := super().write(data)) is None:  # a stream that another program has made non-blocking
            select.select([], [self], [])
        self._is_in_line = written > 0 and bytes(data[written - 1 : written]) != b"\n"
        return written

    def _drop(self, data, why: str) -> int:
        self.lost, self.why = self.lost + max(1, bytes(data).count(b"\n")), why
        return len(data)


def install() -> None:
    """Let standard output and standard error of this process lose text instead of failing.

    If one of the three standard streams was closed when the process was started, it leads to /dev/null from now on:
    otherwise the next file or socket would get its number, and with it the messages of libraries.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, this one
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        if before is not None and not _leads_to(before, descriptor):
            continue
        stream = stream_for(descriptor, before.encoding if before is not None else "utf-8")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _leads_to(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # it only collects text, as in tests
        return False


def stream_for(descriptor: int, encoding: str = "utf-8") -> io.TextIOWrapper:
    """Return a text stream that writes to an open descriptor and loses what it does not accept."""
    raw = io.BufferedWriter(LossyFile(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


def take_losses(name: str) -> str:
    """Return a sentence about what "stdout" or "stderr" has lost since it last said so, "" if nothing."""
    raw = getattr(getattr(getattr(sys, name), "buffer", None), "raw", None)
    if not isinstance(raw, LossyFile) or not raw.lost:
        return ""
    number, raw.lost = raw.lost, 0
    return _loss(number, f"to {name}", raw.why)


def _loss(number: int, where: str, why: str) -> str:
    return f"{number} line(s) of output could not be written {where} ({why})"
