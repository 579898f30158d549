"""Running ranks: waiting for them, killing them, and reporting how and where they ended."""

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.warm import Server

TAIL_LINES = 40


class RankFailed(AssertionError):
    """A rank raised an exception or died. The message has the first rank's traceback, and a line for each other."""


class RanksHung(AssertionError):
    """The deadline has passed. The message has the stack of each rank."""


class RanksLeftBehind(AssertionError):
    """The ranks have ended, but processes that they had started were still running; those have been killed."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    Attributes:
        exitcode: its exit status, or minus the signal that killed it.
        value: what the function returned; None if it did not return.
        error: the traceback of its exception; None if there was none.
        summary: the exception in one line; None if there was none.
        failed_at: time of the exception, in seconds of the machine's monotonic clock.
        stopped: whether the harness killed it because another rank had failed.
    """

    rank: int
    pid: int
    exitcode: int
    value: object = None
    error: str | None = None
    summary: str | None = None
    failed_at: float = float("inf")
    stopped: bool = False

    def in_a_line(self) -> str:
        if self.error:
            return f"rank {self.rank}: {self.summary}"
        if self.exitcode < 0:
            return f"rank {self.rank}: killed by {signal.Signals(-self.exitcode).name}"
        return f"rank {self.rank}: exited with code {self.exitcode}"


class Handle:
    """Running ranks. Use it as a context manager or call :meth:`close`; the fixture closes forgotten handles.

    Attributes:
        pids: process ids of the ranks, in rank order. Each leads a session of its own.
        folder: working directory of the ranks; it is removed with pytest's temporary directory.
    """

    def __init__(self, server: Server, pids: list[int], folder: Path, others: Callable[[], set[int]]):
        self._server, self.pids, self.folder = server, pids, folder
        self._exitcodes: dict[int, int] = {}
        self._stopped: set[int] = set()
        self._others = others
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the process of one rank (not to its helpers). Raise ProcessLookupError if it has ended."""
        if self.exitcode(rank) is not None:
            raise ProcessLookupError(f"rank {rank} has ended with {self.exitcode(rank)}")
        os.kill(self.pids[rank], signum)

    def exitcode(self, rank: int) -> int | None:
        """Return how the rank ended (see :class:`Outcome`); None while it lives."""
        self._listen(0)
        return self._exitcodes.get(rank)

    def output(self, rank: int) -> str:
        """Return what the rank has written to stdout and stderr so far."""
        try:
            return (self.folder / f"{rank}.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_for_output(self, rank: int, text: str, timeout: float = 180) -> None:
        """Wait until the rank has printed `text`. Raise RankFailed if it ends before, RanksHung at the timeout."""
        deadline = time.monotonic() + timeout
        while text not in self.output(rank):
            if self.exitcode(rank) is not None and text not in self.output(rank):
                raise RankFailed(f"rank {rank} ended without printing {text!r}:\n{self.tail(rank)}")
            if time.monotonic() > deadline:
                self._give_up(timeout, f"rank {rank} did not print {text!r}")
            self._listen(0.01)

    def wait(self, timeout: float = 180, stop_at_failure: bool = False) -> list[Outcome]:
        """Wait until every rank has ended.

        Args:
            timeout: seconds from now; afterwards all ranks are killed.
            stop_at_failure: whether to kill the others as soon as a rank ends with an exit code other than 0.

        Returns:
            one outcome per rank, in rank order. A rank that failed is an outcome, not an exception.

        Raises:
            RanksHung: the deadline has passed.
            RanksLeftBehind: all ranks ended with exit code 0, but processes that they had started are still running.
        """
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        while len(self._exitcodes) < len(self.pids):
            if time.monotonic() > deadline:
                self._give_up(timeout, "the ranks did not end")
            self._listen(min(0.2, deadline - time.monotonic()))
            if stop_at_failure and any(self._exitcodes.values()):
                break
        left = self.close()
        outcomes = [self._outcome(rank) for rank in range(len(self.pids))]
        if left and all(outcome.exitcode == 0 for outcome in outcomes):
            raise RanksLeftBehind("the ranks left processes behind (now killed):\n  " + "\n  ".join(left))
        return outcomes

    def close(self) -> list[str]:
        """Kill what is left of the ranks and of their descendants; return a description of these processes."""
        if self.closed:
            return []
        with contextlib.suppress(RuntimeError):
            self._listen(0)
        running = {pid for rank, pid in enumerate(self.pids) if rank not in self._exitcodes}
        self._stopped = running
        left = []
        # A helper process that is just ending is not left behind: look again before reporting it.
        for pause in (0.0, 0.05, 0.2, 0.5, 2.0, 5.0):
            time.sleep(pause)
            found = [pid for pid in self._living() if pid not in running]
            left = [processes.describe(pid) for pid in found]
            if running or not left:
                break
        deadline = time.monotonic() + 60
        while alive := self._living():
            processes.end(alive)
            if time.monotonic() > deadline:
                raise RuntimeError(f"cannot end {', '.join(map(processes.describe, alive))}")
        with contextlib.suppress(RuntimeError):
            while len(self._exitcodes) < len(self.pids) and time.monotonic() < deadline:
                self._listen(0.1)
        self.closed = True
        return left

    def _living(self) -> list[int]:
        """Return the living ranks and all their descendants, also those that have left their sessions."""
        below_server = set(processes.members(set(self.pids), {self._server.pid})) if self._server.pid else set()
        ours = set(processes.members(self.pids))
        return sorted((below_server | ours) - self._others())

    def _listen(self, patience: float) -> None:
        self._server.listen(patience)
        for rank, pid in enumerate(self.pids):
            if rank not in self._exitcodes and pid in self._server.exitcodes:
                self._exitcodes[rank] = self._server.exitcodes.pop(pid)

    def _outcome(self, rank: int) -> Outcome:
        pid, exitcode = self.pids[rank], self._exitcodes.get(rank, -signal.SIGKILL)
        try:
            report = pickle.loads((self.folder / f"{rank}.report").read_bytes())
        except FileNotFoundError:
            return Outcome(rank, pid, exitcode, stopped=pid in self._stopped)
        if report[0] == "value":
            return Outcome(rank, pid, exitcode, value=report[1], stopped=pid in self._stopped)
        # Its end may have been heard of later than those that it caused, but it was not stopped for them.
        _, failed_at, error, summary = report
        return Outcome(rank, pid, exitcode, None, error, summary, failed_at)

    def _give_up(self, timeout: float, what: str) -> None:
        __tracebackhide__ = True
        hung = [rank for rank in range(len(self.pids)) if rank not in self._exitcodes]
        where = "\n".join(f"--- rank {rank} ---\n{self._stack(rank)}" for rank in hung)
        outcomes = [self._outcome(rank) for rank in range(len(self.pids)) if rank not in hung]
        ended = "".join(f"\n{outcome.in_a_line()}" for outcome in outcomes)
        tails = "\n".join(f"--- output of rank {rank} ---\n{self.tail(rank)}" for rank in hung[:1])
        self.close()
        raise RanksHung(f"{what} within {timeout} s; all have been killed.{ended}\n{where}\n{tails}")

    def _stack(self, rank: int) -> str:
        entry = processes.stat(self.pids[rank])
        if entry and entry[0] in "Tt":
            return "stopped by a signal"
        file = self.folder / f"{rank}.stack"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGUSR1)
        deadline, size = time.monotonic() + 20, 0
        while time.monotonic() < deadline:
            time.sleep(0.02)
            grown = file.stat().st_size if file.exists() else 0
            if grown and grown == size:
                break
            size = grown
        return (file.read_text() if file.exists() else "") or "no stack: the process does not answer signals"

    def tail(self, rank: int) -> str:
        """Return the last lines that the rank has written."""
        return "\n".join(self.output(rank).splitlines()[-TAIL_LINES:]) or "(nothing)"
