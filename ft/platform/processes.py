"""Linux processes: their states, ancestry and sessions, ways to kill whole process trees, their progress and stacks.

The stacks are those of a process whose interpreter lock is held, so that no thread of it can run Python code. The
process registers a handler of :mod:`faulthandler` for a real-time signal (:func:`register_handler`). The handler runs
in C, without the lock, and writes the Python calls of the thread that gets the signal into a file in memory, which
another process opens through /proc. So it works while storage hangs. It costs nothing before the signal comes.

The signal goes to the main thread, and then to one other after another. Whoever asks cannot know that the lock is held:
the process may only be slow, and then a handler that writes the calls of all threads reads what other threads free
meanwhile, and ends the process by SIGSEGV (one of some 20 signals did where threads began and ended all the time). That
handler is used, with a second signal, only where the main thread waits in the kernel for a device and can handle no
signal.

The default action of the signal would kill the process, and its handler could be that of a program which has registered
one later. So the signal is sent only to a process that has said that it has registered, still has the file, and has a
handler for the signal.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import resource
import signal
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def allow_files(count: int) -> bool:
    """Raise this process's limit of open files to ``count`` if it is lower and its hard limit allows; return whether
    ``count`` files can be open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # no limit is -1
    if 0 <= soft < count:
        raised = count if hard < 0 else min(count, hard)
        with contextlib.suppress(ValueError, OSError):  # Linux refuses a hard limit above fs.nr_open, an old one, too
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    return soft < 0 or soft >= count


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


_PF_EXITING = 0x4


def killed_by(pid: int) -> int:
    """Return the number of the signal that ends a process, 0 if none does.

    It is known before the process has ended: the kernel first frees its memory, and a device driver what it has locked
    of it, which can take seconds. Only then the parent is told, and the connections of the process are closed.
    """
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(values[-1]) & 0x7F if int(values[6]) & _PF_EXITING else 0


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


def open_memory(pid: int, name: str) -> list[int]:
    """Open the memory files (memfd_create(2)) of this name that a process has open; they outlive the process.

    Returns:
        file descriptors, one for each file; the caller has to close them. None if the process has ended or belongs to
        another user.
    """
    found: dict[tuple[int, int], int] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).partition(" ")[0] == f"/memfd:{name}":
                    fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
                    if found.setdefault(((about := os.fstat(fd)).st_dev, about.st_ino), fd) != fd:
                        os.close(fd)
    return list(found.values())


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


_POLL_S = 1.0
_SLACK_S = 1.0
_MOST_PAUSES = 64
MOST_IN_A_ROW = 3
"""Number of processes in a row that may be killed for making no progress; then the run ends instead of restarting."""


class Standstill:
    """Measures for how long a process and all its descendants have done nothing at all.

    Imports on a busy machine take long, but use the processor. A process that is stopped or blocked for ever uses none.
    """

    def __init__(self) -> None:
        self._seen: Hashable = None
        self._looked_at = self._for_s = 0.0

    def look(self, now: float, pid: int, said: int = 0) -> float:
        """Return the seconds without activity.

        A gap between two calls counts for at most 2 s, so that a pause of the caller does not count.

        Args:
            said: number of messages received from the process so far; a new message counts as activity.
        """
        passed = now - self._looked_at
        if self._seen is None or passed >= _POLL_S:
            seen = (pid, said, activity(pid))
            self._for_s = self._for_s + min(passed, 2 * _POLL_S) if seen == self._seen else 0.0
            self._seen, self._looked_at = seen, now
        return self._for_s


class OwnPauses:
    """Records when a loop that judges others by their silence did not run itself.

    During a pause of the loop, others may have been silent or not: nobody looked. The process was stopped (SIGSTOP,
    ``scontrol suspend``) or its virtual machine was paused, often together with those that it judges. So it does not
    count the pause.

    Args:
        period_s: longest time between two calls of ``look`` that the loop intends, in seconds.
    """

    def __init__(self, period_s: float):
        self._longest_s = period_s + _SLACK_S
        self._looked_at: float | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=_MOST_PAUSES)

    def look(self, now: float) -> float:
        """Return the seconds for which the loop has not run just before ``now``, 0 if it ran as it intends."""
        last, self._looked_at = self._looked_at, now
        if last is None or now - last <= self._longest_s:
            return 0.0
        self._pauses.append((last, now))
        return now - last

    def since(self, at: float) -> float:
        """Return the seconds of all pauses after ``at``."""
        return sum(end - max(begin, at) for begin, end in self._pauses if end > at)

    def between(self, begin: float, end: float) -> float:
        """Return the seconds from ``begin`` to ``end``, without the pauses."""
        return max(0.0, end - begin - self.since(begin) + self.since(end))


_NAME = "ft-stacks"
_SIGNALS = range(50, 40, -1)
"""Signals that may be used: real-time signals that neither C libraries nor common runtimes use."""
_LIMIT_S, _PAUSE_S = 0.2, 0.005
_OWN_STACK = "Stack (most recent call first):"
_UNDISTURBED = re.compile(r"R|S .*(futex|nanosleep)")
"""Matches where a thread is (:func:`tasks`) if a signal does not disturb it: it computes, or waits for a lock or timer.

A signal would end a wait for a connection with EINTR. Python handles that in the main thread; a thread of a library may
not."""
_LONGEST = 1 << 20
"""Maximum length of the stacks, in bytes."""


@dataclass(frozen=True)
class Handler:
    """The handler that a process has registered.

    Attributes:
        signum: signal at which the thread that gets it writes its stack.
        everybody: signal at which the stacks of all threads are written.
        fd: descriptor, in that process, of the file that the stacks are written to.
        thread: identifier of its main thread, as ``threading.get_ident`` returns it.
    """

    signum: int
    everybody: int
    fd: int
    thread: int

    @classmethod
    def of(cls, values: Any) -> "Handler | None":
        """Return the handler from the JSON values that a process has sent; None if they describe no handler."""
        try:
            return cls(*(int(values[name]) for name in ("signum", "everybody", "fd", "thread")))
        except (KeyError, TypeError, ValueError):
            return None


_registered: tuple[int, Handler] | None = None


def register_handler(thread: int) -> Handler | None:
    """Register the handler in this process, unless it has one; None if no two signals are free, or no file is made.

    Args:
        thread: identifier of the main thread.
    """
    global _registered
    pid = os.getpid()
    if _registered is None:
        free = [one for one in _SIGNALS if _is_free(one)]
    elif _registered[0] == pid:
        return _registered[1]
    else:  # a fork has inherited the handlers, with the file of its parent
        free = [_registered[1].signum, _registered[1].everybody]
    if len(free) < 2:
        return None
    try:
        fd = os.memfd_create(_NAME)
        for signum, all_threads in zip(free, (False, True), strict=False):
            faulthandler.register(signum, file=fd, all_threads=all_threads, chain=False)
    except (OSError, RuntimeError, ValueError):
        return None
    _registered = pid, Handler(free[0], free[1], fd, thread)
    return _registered[1]


def _is_free(signum: int) -> bool:
    """Return whether this process neither handles, ignores nor blocks a signal."""
    masks = signals(os.getpid())
    return signal.SIGRTMIN <= signum <= signal.SIGRTMAX and not any(signum in mask for mask in masks.values())


def stacks_of(asked: Mapping[str, tuple[int, Handler]]) -> dict[str, str]:
    """Return the stacks of processes as text, as far as they write them within 0.2 s; that of the main thread first.

    Args:
        asked: name -> pid of a process, and its handler.
    """
    readers = {name: reader for name, (pid, handler) in asked.items() if (reader := _StackReader.of(pid, handler))}
    deadline = time.monotonic() + _LIMIT_S
    try:
        while any(not reader.is_done for reader in readers.values()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            for reader in readers.values():
                reader.proceed()
    finally:
        for reader in readers.values():
            os.close(reader.file)
    return {name: reader.text for name, reader in readers.items() if reader.text}


class _StackReader:
    """Has the threads of one process write their stacks, one after another. Make it with ``of``.

    Args:
        file: descriptor of the handler's file, in this process.

    Attributes:
        file: as passed.
        text: the stacks, each below a line with the identifier of its thread.
        is_done: whether all threads were asked that a signal does not disturb.
    """

    def __init__(self, pid: int, handler: Handler, file: int):
        self._pid, self._handler, self.file = pid, handler, file
        self._at, self._written = os.fstat(file).st_size, b""
        self._left = [thread for _, thread, where in tasks(pid) if thread != pid and _UNDISTURBED.match(where)]
        self._thread, self._is_first, self.is_done, self.text = handler.thread, True, False, ""
        if state(pid) == "D":
            send(pid, handler.everybody)
            self._left = []
        else:
            self._signal(pid)

    @classmethod
    def of(cls, pid: int, handler: Handler) -> "_StackReader | None":
        """Return a reader that has sent the first signal; None if it is not safe to send one."""
        path = Path(f"/proc/{pid}/fd/{handler.fd}")
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith(f"/memfd:{_NAME}") or state(pid) in "TtZX":
                return None
            if {handler.signum, handler.everybody} <= set(signals(pid)["SigCgt"]):
                return cls(pid, handler, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return None

    def proceed(self) -> None:
        """Take what was written since the last call; if that is all of it, ask the next thread."""
        written = os.pread(self.file, _LONGEST, self._at)
        is_growing, self._written = written != self._written, written
        if self.is_done or is_growing or (self._is_first and not written):
            return
        head = f"Thread 0x{self._thread:x} (most recent call first):"
        self.text += written.decode(errors="replace").replace(_OWN_STACK, head)
        self._at, self._written, self._is_first = self._at + len(written), b"", False
        self.is_done = not self._left
        if self._left:
            self._thread = self._left.pop(0)
            self._signal(self._thread)

    def _signal(self, thread: int) -> None:
        _libc.tgkill(self._pid, thread, self._handler.signum)  # fails if the thread has ended: then it writes nothing
