"""Linux processes in tests: those of ft.platform, their command lines, and ending them for certain."""

import contextlib
import os
import signal
import time
from pathlib import Path

from ft.platform.processes import adopt_orphans, die_with_parent, ended_children, members, stat

__all__ = ["adopt_orphans", "describe", "die_with_parent", "end", "ended_children", "members", "runs", "stat"]


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    entry = stat(pid)
    return entry is not None and entry[0] not in "ZX"


def describe(pid: int) -> str:
    """Return the pid and the command line of a process, for messages."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        command = "gone"
    return f"{pid}: {command[:160]}"


def end(pids: list[int], patience: float = 30.0) -> None:
    """Kill the processes with SIGKILL and wait until none runs; raise RuntimeError after `patience` seconds."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + patience
    while alive := [pid for pid in pids if runs(pid)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"survived SIGKILL for {patience} s: {', '.join(map(describe, alive))}")
        time.sleep(0.005)
