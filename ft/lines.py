"""A file that lines are appended to, and that a full disk makes wait, not fail."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path


class Lines:
    """Appends to ``path``; what finds no room, or meets another error of the file's, is tried again with the next line.

    A line that a crash of an earlier writer has torn is ended, so that the first one after it is not lost too.

    Args:
        most: lines that wait in memory at most; beyond that the oldest but one is given up. None: any number.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, most: int | None = None):
        self._path, self._most = path, most
        self._waiting: deque[bytes] = deque()
        self._begun = 0  # bytes of the first one that are written
        self._open()

    def write(self, line: bytes) -> None:
        """Adds a line, given with its end."""
        self._waiting.append(line)
        self._flush()
        if self._most is not None and len(self._waiting) > self._most:
            del self._waiting[1]

    def replace(self, change: Callable[[], None], is_kept: Callable[[bytes], bool]) -> None:
        """Calls ``change``, which changes the file; of the lines that wait only those that are ``is_kept`` stay."""
        self._waiting, self._begun = deque(line for line in self._waiting if is_kept(line)), 0
        os.close(self._fd)
        change()
        self._open()

    def close(self) -> None:
        self._flush()
        os.close(self._fd)

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            self._waiting.appendleft(b"\n")

    def _flush(self) -> None:
        with contextlib.suppress(OSError):
            while self._waiting:
                self._begun += os.write(self._fd, self._waiting[0][self._begun :])
                if self._begun == len(self._waiting[0]):
                    self._waiting.popleft()
                    self._begun = 0
