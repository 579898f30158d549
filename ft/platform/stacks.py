"""Stacks of a process whose interpreter lock is held, so that no thread of it can run Python code.

The process registers a handler of :mod:`faulthandler` for a real-time signal. The handler runs in C, without the lock,
and writes the Python calls of all threads into a file in memory, which another process opens through /proc. So it works
while storage hangs. It costs nothing before the signal comes.

The default action of the signal would kill the process, and its handler could be that of a program which has registered
one later. So the signal is sent only to a process that has said that it has registered, still has the file, and has a
handler for the signal.
"""

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.platform import processes

_NAME = "ft-stacks"
_SIGNALS = range(50, 40, -1)
"""Signals that may be used: real-time signals that neither C libraries nor common runtimes use."""
_LIMIT_S, _LOOK_S = 0.2, 0.005
_LONGEST = 1 << 20
"""Maximum length of the stacks, in bytes."""


@dataclass(frozen=True)
class Handler:
    """The handler that a process has registered.

    Attributes:
        signum: the signal.
        fd: descriptor, in that process, of the file that the stacks are written to.
        thread: identifier of its main thread, as ``threading.get_ident`` returns it.
    """

    signum: int
    fd: int
    thread: int

    @classmethod
    def of(cls, values: Any) -> "Handler | None":
        """Return the handler from the JSON values that a process has sent; None if they describe no handler."""
        try:
            return cls(int(values["signum"]), int(values["fd"]), int(values["thread"]))
        except (KeyError, TypeError, ValueError):
            return None


_registered: tuple[int, Handler] | None = None


def register(thread: int) -> Handler | None:
    """Register the handler in this process, unless it has one; None if no signal is free, or there is no memory file.

    Args:
        thread: identifier of the main thread.
    """
    global _registered
    pid, signum = os.getpid(), None
    if _registered is not None:
        if _registered[0] == pid:
            return _registered[1]
        signum = _registered[1].signum  # a fork has inherited the handler, with the file of its parent
    signum = signum or next((one for one in _SIGNALS if _is_free(one)), None)
    if signum is None:
        return None
    try:
        fd = os.memfd_create(_NAME)
        faulthandler.register(signum, file=fd, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        return None
    _registered = pid, Handler(signum, fd, thread)
    return _registered[1]


def _is_free(signum: int) -> bool:
    """Return whether this process neither handles, ignores nor blocks a signal."""
    masks = processes.signals(os.getpid())
    return signal.SIGRTMIN <= signum <= signal.SIGRTMAX and not any(signum in mask for mask in masks.values())


def of_processes(asked: Mapping[str, tuple[int, Handler]], is_whole: Callable[[str, Handler], bool]) -> dict[str, str]:
    """Return the stacks of processes as text, as far as they write them within 0.2 s.

    Args:
        asked: name -> pid of a process, and its handler.
        is_whole: returns whether a text contains all that is wanted.
    """
    files: dict[str, tuple[int, int]] = {}
    found: dict[str, str] = {}
    try:
        for name, (pid, handler) in asked.items():
            if (opened := _ask(pid, handler)) is not None:
                files[name] = opened
        deadline = time.monotonic() + _LIMIT_S
        open_ = set(files)
        while open_ and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            for name in sorted(open_):
                before = found.get(name, "")
                text = found[name] = os.pread(files[name][0], _LONGEST, files[name][1]).decode(errors="replace")
                if text == before and is_whole(text, asked[name][1]):
                    open_.discard(name)
    finally:
        for descriptor, _ in files.values():
            os.close(descriptor)
    return {name: text for name, text in found.items() if text}


def _ask(pid: int, handler: Handler) -> tuple[int, int] | None:
    """Send the signal if that is safe. Return (descriptor of the file here, its length so far), else None."""
    path = Path(f"/proc/{pid}/fd/{handler.fd}")
    with contextlib.suppress(OSError):
        if not os.readlink(path).startswith(f"/memfd:{_NAME}") or processes.state(pid) in "TtZX":
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        length = os.fstat(descriptor).st_size
        if handler.signum in processes.signals(pid)["SigCgt"]:
            processes.send(pid, handler.signum)
            return descriptor, length
        os.close(descriptor)
    return None
