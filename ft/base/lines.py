"""An append-only text file that tolerates a full disk: lines wait in memory instead of raising an error.

The event log and the other logs of a run are written with it, so that training continues while a disk is full.
"""

import contextlib
import errno
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ft.base import files

_MOST = 10_000
_END = b"\n"


class Lines:
    """Appends lines to ``path``.

    A line that cannot be written (a full disk, an I/O error) is retried with the next line. So is opening the file, if
    the disk has no room for a new one.

    If only part of a line fits on the disk, that part is removed again, so that readers never see it. If other
    processes append to the file too, the part cannot be removed: it is terminated by a newline, and readers skip it. An
    incomplete last line from a writer that crashed is terminated in the same way.

    Args:
        most: maximum number of lines that wait in memory; above it the oldest line is dropped. None: no limit.
        is_shared: other processes may append to the file at the same time.
        tell: function that prints a message. It is called when lines begin to wait, when they have been written, and
            when lines are lost.
        is_link_followed: whether ``path`` may be a link.

    Attributes:
        lost: number of lines that are neither in the file nor in memory.
        size: number of bytes in the file when it was opened.

    Raises:
        OSError: the file cannot be opened, for another reason than a full disk.
    """

    def __init__(
        self,
        path: Path,
        most: int | None = _MOST,
        is_shared: bool = False,
        tell: Callable[[str], None] | None = None,
        is_link_followed: bool = False,
    ):
        self._opener = os.open if is_link_followed else files.open_no_link
        self._path, self._most, self._is_shared, self._tell = path, most, is_shared, tell or _warn
        self._waiting: deque[bytes] = deque()
        self._trouble: OSError | None = None
        self.lost = self.size = 0
        self._fd = -1
        self._open_if_there_is_room()

    def write(self, *lines: bytes) -> None:
        """Append lines, each of which ends with a newline."""
        for line in lines:
            self._waiting.append(line)
            self._flush()
            if self._most is not None and len(self._waiting) > self._most:
                del self._waiting[self._waiting[0] == _END]
                self.lost += 1

    def replace(self, change: Callable[[], None], is_kept: Callable[[bytes], bool]) -> None:
        """Call ``change``, which replaces the file, and append to the new file from then on.

        Waiting lines for which ``is_kept`` returns False are dropped.
        """
        self._waiting = deque(line for line in self._waiting if is_kept(line))
        self._close()
        change()
        self._open_if_there_is_room()

    def close(self) -> None:
        """Write the waiting lines as far as there is space. The rest is lost, and a message says how many."""
        self._flush()
        self._close()
        self.lost += sum(line != _END for line in self._waiting)
        self._waiting.clear()
        if self.lost:
            why = f" ({self._trouble.strerror})" if self._trouble else ""
            self._tell(f"warning: {self._path} has lost {self.lost} lines, because the disk had no space for them{why}")

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _open_if_there_is_room(self) -> None:
        try:
            self._open()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _open(self) -> None:
        self._fd = self._opener(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self.size = size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != _END:
            self._waiting.appendleft(_END)

    def _flush(self) -> None:
        waited = len(self._waiting) - 1
        try:
            if self._fd < 0:
                self._open()
            while self._waiting:
                self._put(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if self._trouble is None:
                most = "its lines wait" if self._most is None else f"up to {self._most} lines of it wait"
                problem = f"{self._path} cannot be written ({error.strerror})"
                self._tell(f"warning: {problem}: {most} in memory until they can be written; free space on its disk")
            self._trouble = error
            return
        if self._trouble is not None:
            self._trouble = None
            self._tell(
                f"{self._path} can be written again: {waited} lines that waited were written, {self.lost} are lost"
            )

    def _put(self, line: bytes) -> None:
        """Write a whole line.

        Raises:
            OSError: the line does not fit.
        """
        written = os.write(self._fd, line)
        if written == len(line):
            return
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        if not self._is_shared and os.fstat(self._fd).st_size == end:
            os.ftruncate(self._fd, end - written)
        elif line[written:] == _END:
            self._waiting[0] = _END  # only the newline is missing
        else:
            self._waiting.appendleft(_END)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the disk behind stderr may be full too
        print(text, file=sys.stderr, flush=True)
