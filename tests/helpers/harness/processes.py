"""Linux processes: finding descendants and living processes, and killing them reliably."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int) -> None:
    """Ask the kernel to send this process `signum` when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state letter, parent, session) of a process; None if it is gone. A zombie's state is Z."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]
    return state, int(parent), int(session)


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    entry = stat(pid)
    return entry is not None and entry[0] not in "ZX"


def living(roots: set[int], sessions: set[int]) -> list[int]:
    """Return the processes, without zombies, that descend from one of `roots` or belong to one of `sessions`."""
    table = {int(name): stat(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    table = {pid: entry for pid, entry in table.items() if entry}

    def descends(pid: int) -> bool:
        while pid in table:
            pid = table[pid][1]
            if pid in roots:
                return True
        return False

    return [
        pid
        for pid, (state, _, session) in table.items()
        if state not in "ZX" and pid not in roots and (session in sessions or descends(pid))
    ]


def describe(pid: int) -> str:
    """Return the pid and the command line of a process, for messages."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        command = "gone"
    return f"{pid}: {command[:160]}"


def end(pids: list[int], patience: float = 5.0) -> None:
    """Kill the processes with SIGKILL and wait until none runs; raise RuntimeError after `patience` seconds."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + patience
    while alive := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"survived SIGKILL for {patience} s: {', '.join(map(describe, alive))}")
        time.sleep(0.005)
