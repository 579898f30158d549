"""Supervises child processes: starts them, reaps them, and runs an event loop over exits, signals and sockets.

The node agent of ``ft run`` and the launcher of ``ft run --ft-hsdp-replicas`` are built on it.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ft.base import output
from ft.base.checkout import CHECKOUT
from ft.base.files import open_no_link
from ft.platform import processes

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which schedulers, their tools and closed terminals ask a run to save and end: all mean the same."""
END_SIGNALS = (*SAVE_SIGNALS, signal.SIGINT)
"""Signals that ask a run to end."""
_REPEAT_S = 2.0
"""Seconds within which a repeated signal counts as the same request.

Slurm signals all processes of a step, srun may forward the signal that it received itself, and so may a terminal.
"""
_ORPHANED = 70
"""Exit code of a child whose parent has died before the child could ask the kernel to be killed with it."""
_BOOT = (
    "import sys; sys.path[0] = sys.argv.pop(1); from ft.platform.supervisor import begin; begin(); "
    "from {} import main; sys.exit(main())"
)


def command(module: str, arguments: Sequence[str], parent: int, ignores_signals: bool) -> list[str]:
    """Return the command of a process that imports ``ft`` from this process's folder, and dies with its parent.

    Args:
        module: module whose function ``main`` is called; what it returns is the exit code.
        ignores_signals: whether the process ignores END_SIGNALS.
    """
    how = [str(CHECKOUT), str(parent), "ignore" if ignores_signals else ""]
    return [sys.executable, "-c", _BOOT.format(module), *how, *arguments]


def begin() -> None:
    """Do the first steps of a process that was started with ``command``."""
    output.install()
    parent, ignore = int(sys.argv.pop(1)), sys.argv.pop(1)
    processes.die_with_parent(signal.SIGKILL)
    for signum in END_SIGNALS if ignore else ():
        signal.signal(signum, signal.SIG_IGN)
    if os.getppid() != parent:
        os._exit(_ORPHANED)


class Wake:
    """A self-pipe that wakes an event loop: signal handlers and other threads write to it."""

    def __init__(self):
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __call__(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.write_fd, b"\0")

    def take(self) -> bytes:
        """Return the bytes written since the last call: signal numbers, and 0 for each call from another thread."""
        try:
            return os.read(self.read_fd, 4096)
        except BlockingIOError:
            return b""


class Supervisor:
    """Event loop of a process that supervises child processes.

    Attributes:
        wake: wakes the event loop from another thread when it is called.
    """

    def __init__(self) -> None:
        self.wake = Wake()
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[subprocess.Popen, Callable[[int], None]]] = {}
        self._signum, self._signalled_at = 0, 0.0
        self._on_signal: Callable[[int], None] = lambda signum: None
        self._on_other: Callable[[int, int], None] = lambda pid, code: None

    def open(
        self, on_signal: Callable[[int], None], on_other: Callable[[int, int], None] = lambda pid, code: None
    ) -> None:
        """Handle the signals of this process from now on, and adopt orphans of its children.

        Args:
            on_signal: called by ``turn`` with one of END_SIGNALS; repetitions within 2 s count as one. SIGHUP is
                ignored if this process was started so, as nohup does it.
            on_other: called by ``turn`` with (pid, exit code) of a child that ``start`` has not started.
        """
        self._on_signal, self._on_other = on_signal, on_other
        processes.adopt_orphans()
        signal.set_wakeup_fd(self.wake.write_fd, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, *END_SIGNALS):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
        self.watch(self.wake.read_fd, self._on_wake)

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        out: Path,
        on_exit: Callable[[int], None],
        *,
        err: Path | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Collection[int] = (),
        ignores_signals: bool = True,
    ) -> subprocess.Popen:
        """Start a child process, which dies with this process and receives Ctrl-C only through it.

        Args:
            module: module whose function ``main`` the child calls.
            out: file that standard output is appended to.
            on_exit: called by ``turn`` with the exit code, or the negated number of the signal that killed the child.
            err: file that standard error is appended to; None: ``out``.
            environment: its environment variables; None: those of this process.
            stdin: ``subprocess.PIPE`` or ``subprocess.DEVNULL``.
            pass_fds: file descriptors that stay open in the child.
            ignores_signals: whether the child ignores END_SIGNALS, which Slurm may send to all processes of a job
                step.

        Raises:
            OSError: a file cannot be written, or no process can be created.
        """
        with open(out, "ab", opener=open_no_link) as stdout, open(err or out, "ab", opener=open_no_link) as stderr:
            child = subprocess.Popen(
                command(module, arguments, os.getpid(), ignores_signals),
                env=environment,
                start_new_session=True,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=tuple(pass_fds),
            )
        self._children[child.pid] = (child, on_exit)
        return child

    def end(self, child: subprocess.Popen) -> None:
        """Kill and reap a child, without calling its ``on_exit``."""
        self._children.pop(child.pid, None)
        child.kill()
        child.wait()

    def orphans(self, others: Collection[int] = ()) -> list[int]:
        """Return the child processes that are neither in ``others`` nor started by ``start``.

        These children are orphans that this process has adopted.
        """
        known = self._children.keys() | set(others)
        return [pid for pid in processes.children(os.getpid()) if pid not in known]

    def watch(self, what: Any, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` whenever the descriptor ``what`` is readable."""
        self._selector.register(what, selectors.EVENT_READ, on_readable)

    def unwatch(self, what: Any) -> None:
        """Undo ``watch``, if ``what`` is watched."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(what)

    def turn(self, longest_s: float) -> bool:
        """Wait at most ``longest_s`` seconds for something to happen, and call the functions that handle it.

        Return True if something has happened, False if the time is up.
        """
        found = self._selector.select(longest_s)
        for key, _ in found:
            key.data()
        return bool(found)

    def close(self) -> None:
        """Kill and reap all descendants of this process, and handle no more signals."""
        processes.end_descendants()
        signal.set_wakeup_fd(-1)
        self._selector.close()

    def _on_wake(self) -> None:
        signals = self.wake.take()
        if signal.SIGCHLD in signals:
            self._reap()
        for signum in signals:
            if signum in END_SIGNALS and not self._is_repeated(signum):
                self._on_signal(signum)

    def _is_repeated(self, signum: int) -> bool:
        now, same = time.monotonic(), SAVE_SIGNALS if signum in SAVE_SIGNALS else (signum,)
        if self._signum in same and now - self._signalled_at < _REPEAT_S:
            return True
        self._signum, self._signalled_at = signum, now
        return False

    def _reap(self) -> None:
        for pid, status in processes.ended_children():
            code = os.waitstatus_to_exitcode(status)
            if pid in self._children:
                child, on_exit = self._children.pop(pid)
                child.returncode = code
                on_exit(code)
            else:
                self._on_other(pid, code)
