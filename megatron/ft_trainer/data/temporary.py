"""Temporary names for files that are being written, and the removal of temporary files that killed writers left."""

import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

# Seconds after its last change before a file is removed. Process ids are ambiguous across containers that share a host
# name, so a recently changed file may belong to a running process in another container.
_LEFT_ALONE_S = 600


def temporary_name(final: str) -> str:
    """Return a name beside ``final`` that no other writer uses."""
    return f"{final}{_mark()}{os.getpid()}"


def remove_leftovers(final: str) -> None:
    """Remove files and folders with temporary names of ``final`` whose writers on this machine have ended."""
    path = Path(final).absolute()
    start = path.name + _mark()
    for item in path.parent.glob(f"{_escaped(start)}*"):
        pid = item.name.removeprefix(start).split(".")[0]
        with suppress(OSError):
            if pid.isdigit() and not _alive(int(pid)) and time.time() - item.stat().st_mtime > _LEFT_ALONE_S:
                shutil.rmtree(item) if item.is_dir() else item.unlink()


def _mark() -> str:
    return f".tmp-{socket.gethostname()}-"


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
