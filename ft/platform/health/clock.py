"""Reads the node's clock: its source, whether it is synchronized, and how far it is from the monotonic clock."""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

from ft.platform.health.files import Source, text

_UNSYNCHRONIZED = 0x40
_WORDS_BEFORE_STATUS = 5
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def kernel_status() -> tuple[int, int] | None:
    """Return (status bits, largest error in microseconds) of the kernel's clock, as ``adjtimex`` reports them.

    Returns:
        None if the call is not permitted or not there.
    """
    try:
        # struct timex begins with: modes, offset, freq, maxerror, esterror, status; it has at most 208 bytes
        words = (ctypes.c_long * 32)()
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(words)) < 0:
            return None
        return int(words[_WORDS_BEFORE_STATUS]) & 0xFFFFFFFF, int(words[3])
    except (OSError, AttributeError):
        return None


def read(
    root: Path, node: str, when: float, status: Callable[[], tuple[int, int] | None] = kernel_status, ahead: float = 0.0
) -> Source:
    """Return the observations of the clock.

    Args:
        root: root of the file tree, normally "/".
        node: name of the node.
        when: wall time in seconds since 1970.
        status: function that returns what ``kernel_status`` does.
        ahead: wall time minus monotonic time of this host, in seconds; its change shows a step of the clock.
    """
    found = Source(node, when)
    source = text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source is not None:
        found.add("", "clock.slow_source", int(source in _SLOW_SOURCES), text=source)
    answer = status()
    if answer is not None:
        bits, error_us = answer
        found.add("", "clock.unsynchronized", int(bool(bits & _UNSYNCHRONIZED)))
        if not bits & _UNSYNCHRONIZED:
            found.add("", "clock.error", error_us / 1e6, "s")
    else:
        found.unreadable = "adjtimex is not permitted, or the clock is not this node's"
    found.add("", "clock.ahead", ahead, "s")
    return found


def ahead_of_monotonic() -> float:
    """Return wall time minus monotonic time of this host, in seconds."""
    return time.time() - time.monotonic()
