"""Reads the stacks that :mod:`faulthandler` writes of all threads of a process."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ft.faults.hang.look import Thread
from ft.faults.hang.names import source_name

_HEAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\):")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_COLLECTING = "  Garbage-collecting"
COLLECTION = "garbage collection of Python"
"""Stands as the innermost call in the stack of a thread that collects garbage."""


def has_stack_of(thread: int, text: str) -> bool:
    """Return whether a text contains the calls of a thread, or says that it has none."""
    return any(int(match[1], 16) == thread and "\n" in text[match.end() + 1 :] for match in _HEAD.finditer(text))


def read(text: str, training: int, folder: str = "") -> list[Thread]:
    """Return the threads of a process, the training thread first.

    Args:
        text: what faulthandler has written.
        training: identifier of the training thread.
        folder: working directory of the process; paths in it are shortened, like those of installed packages.
    """
    found: list[Thread] = []
    for line in text.splitlines():
        if (head := _HEAD.fullmatch(line)) is not None:
            trains = int(head[1], 16) == training
            name = head[2] or ("MainThread" if trains else f"thread {len(found)}")
            found.append(Thread(name, trains=trains))
        elif found and line == _COLLECTING:
            found[-1] = replace(found[-1], frames=(COLLECTION,))
        elif found and (call := _CALL.fullmatch(line)) is not None:
            frame = f"{source_name(call[1], folder)}:{call[2]} {call[3]}"
            found[-1] = replace(found[-1], frames=(*found[-1].frames, frame))
    return sorted(found, key=lambda thread: not thread.trains)


def with_kernel(threads: Sequence[Thread], of_the_system: Sequence[Thread]) -> tuple[Thread, ...]:
    """Return the threads of a process with their calls, and with what the operating system says of them.

    Only the training thread is known to be the same in both, the first one. All others are listed twice.

    Args:
        threads: the threads with their calls.
        of_the_system: all threads as the operating system lists them.
    """
    main = next((thread for thread in of_the_system if thread.trains), Thread(""))
    merged = [replace(one, kernel=main.kernel) if one.trains else one for one in threads]
    if not any(thread.trains for thread in merged):
        return (*of_the_system, *merged)
    return (*merged, *(thread for thread in of_the_system if not thread.trains))
