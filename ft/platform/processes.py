"""Linux processes: their states, ancestry and sessions, and ways to kill whole process trees."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int) -> None:
    """Ask the kernel to send ``signum`` to this process when its parent dies; 0 revokes an earlier request.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Make this process a subreaper: it becomes the parent of every descendant whose own parent dies.

    Raises:
        OSError: the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show for this process, cut to 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state letter, parent, session) of a process, None once it is gone. The state of a zombie is Z."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]
    return state, int(parent), int(session)


def identity(pid: int) -> str:
    """Return an identifier of a process, unique over hosts and time: boot, pid namespace, pid and start time."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        began = ""
    return f"{boot} {pid} {began}"


def lives(known: str) -> bool | None:
    """Return whether the process with the identifier ``known`` is alive, None if it belongs to another host."""
    boot, _, rest = known.partition(" ")
    pid = rest.partition(" ")[0]
    if not pid.isdecimal():
        return None
    here = identity(int(pid))
    if here.partition(" ")[0] != boot:
        return None
    return here == known and state(int(pid)) not in "ZX"


def state(pid: int) -> str:
    """Return the state letter of a process, "X" once it is gone."""
    found = stat(pid)
    return found[0] if found else "X"


def activity(pid: int) -> tuple[tuple[int, ...], ...]:
    """Return counters of a process and its descendants: processor time, page faults and context switches.

    If two calls return equal results, none of these processes has run in between.
    """
    found = []
    for one in (pid, *members([pid], [pid])):
        with contextlib.suppress(OSError):
            values = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            switches = [
                line for line in Path(f"/proc/{one}/status").read_text().splitlines() if "ctxt_switches" in line
            ]
            counts = [int(line.split()[1]) for line in switches]
            found.append((one, int(values[9]), int(values[11]), int(values[12]), *counts))
    return tuple(sorted(found))


def describe(pid: int) -> str:
    """Describe the state of a process in words."""
    letter = state(pid)
    words = {"T": "stopped", "t": "traced", "D": "blocked in the kernel", "Z": "ended", "X": "gone"}
    return f"process {pid} is {words.get(letter, 'alive')}"


def tasks(pid: int) -> list[tuple[str, int, str]]:
    """Return (name, thread id, state) of each thread of a process, the main thread first; [] once it is gone.

    The state is the kernel's letter (R runs, S sleeps, D waits for a device or a file system, T is stopped), followed
    by the kernel function in which the thread waits, where the kernel tells it.
    """
    found = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(OSError):
                letter = (task / "stat").read_text().rpartition(")")[2].split()[0]
                found.append((_line(task / "comm"), int(task.name), f"{letter} {_line(task / 'wchan')}".strip(" 0")))
    return found


def folder(pid: int) -> str:
    """Return the working directory of a process, "" if that is not known."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def signals(pid: int) -> dict[str, set[int]]:
    """Return which signals a process handles ("SigCgt"), ignores ("SigIgn") and blocks in its main thread ("SigBlk").

    All sets are empty once it is gone.
    """
    found: dict[str, set[int]] = {"SigCgt": set(), "SigIgn": set(), "SigBlk": set()}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                mask = int(value, 16)
                found[name] = {number for number in range(1, 65) if mask >> (number - 1) & 1}
    return found


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def threads() -> int:
    """Return the number of threads of this process, including those of C libraries."""
    return len(os.listdir("/proc/self/task"))


def members(sessions: Iterable[int], roots: Iterable[int] = ()) -> list[int]:
    """Return the living processes in one of ``sessions`` or descended from one of ``roots``, without the roots."""
    sessions, roots = set(sessions), set(roots)
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
        for pid, (letter, _, session) in table.items()
        if letter not in "ZX" and pid not in roots and (session in sessions or descends(pid))
    ]


def send(pid: int, signum: int) -> None:
    """Send a signal to a process, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def kill_whole(leaders: list[int]) -> None:
    """Send SIGKILL to session leaders, to all members of their sessions and to all descendants of the leaders."""
    # found before the kill, because a process whose parent has died is no descendant any more
    below = members(leaders, leaders)
    for pid in (*leaders, *below):
        send(pid, signal.SIGKILL)


def kill_remains(leaders: list[int]) -> None:
    """Send SIGKILL to the remaining processes in the sessions of leaders that have ended."""
    for pid in members(leaders):
        send(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Return the children of a process, zombies included."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and (stat(int(name)) or ("", -1, -1))[1] == pid]


def ended_children() -> Iterator[tuple[int, int]]:
    """Reap the children of this process that have ended; yield the (pid, wait status) of each."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def end_descendants(patience_s: float = 5.0) -> None:
    """Kill and reap all descendants of this process, a subreaper. Give up on survivors after ``patience_s`` seconds."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for pid in members([], [os.getpid()]):
            send(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.005)


def how_it_ended(code: int) -> str:
    """Describe an exit code in words. A negative code is the negated number of the signal that killed the process."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
