"""Runs one check in a process of its own, with a deadline that also holds when a driver hangs."""

import os
import signal
import time
from pathlib import Path

from ft.job.agent.environment import defaults
from ft.lab.selftest.child import RESULT, read
from ft.lab.selftest.values import FAIL, SKIPPED, Check, Context, Result
from ft.platform import processes
from ft.platform.supervisor import Supervisor

_TURN_S, _PATIENCE_S = 0.1, 5.0
LOG = "check.log"
_STUCK = "a process is stuck in the kernel, as with a hung driver: look at dmesg and nvidia-smi, and reboot the node"


class Interrupted(Exception):
    """The self-test was asked to end.

    Args:
        signum: the signal.
    """

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Executor:
    """Starts checks one after another. Use it as a context: at its end no process is left, whatever happened."""

    def __init__(self) -> None:
        self._supervisor = Supervisor()
        self._signum: int | None = None

    def __enter__(self) -> "Executor":
        self._supervisor.open(self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        self._supervisor.close()

    def turn(self, longest_s: float = _TURN_S) -> None:
        """Wait at most ``longest_s`` seconds for a process or a signal.

        Raises:
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        self._supervisor.turn(longest_s)
        if self._signum is not None:
            raise Interrupted(self._signum)

    def run(self, check: Check, context: Context, is_cut: bool) -> Result:
        """Run a check and return its result. Kill its processes when ``context.limit_s`` is over.

        Args:
            check: the check.
            context: what it is given.
            is_cut: whether that limit is what was left of ``--minutes`` instead of the check's own.

        Raises:
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        began, codes = time.monotonic(), []
        context.scratch.mkdir(parents=True, exist_ok=True)
        log = context.scratch / LOG
        arguments = [check.function, context.encoded()]
        environment = {**os.environ, **defaults(os.environ)}  # as the workers of a run have it
        child = self._supervisor.start("ft.lab.selftest.child", arguments, log, codes.append, environment=environment)
        while not codes and time.monotonic() - began < context.limit_s:
            self.turn()
        seconds = time.monotonic() - began
        ended = list(codes)  # what the kill adds is not the end that is judged
        is_stuck = not ended and not self._kill(child.pid)
        self._end_rest()
        found = read(context.scratch / RESULT)
        if found is None:
            found = _without_result(ended, context, is_cut, log)
        if is_stuck:
            found = Result(FAIL, f"{found.text}; its process cannot be killed", _STUCK)
        found.seconds = round(seconds, 3)
        return found

    def _kill(self, pid: int) -> bool:
        """Kill the check's process with all below it; return whether it is gone."""
        deadline = time.monotonic() + _PATIENCE_S
        processes.kill_whole([pid])
        while time.monotonic() < deadline:
            self._supervisor.turn(_TURN_S)
            if processes.state(pid) in "ZX":
                return True
        return False

    def _end_rest(self) -> None:
        """Kill what the check has left: this process is a subreaper, so all of it is below it."""
        deadline = time.monotonic() + _PATIENCE_S
        while (left := processes.members([], [os.getpid()])) and time.monotonic() < deadline:
            for pid in left:
                processes.send(pid, signal.SIGKILL)
            self._supervisor.turn(_TURN_S)

    def _on_signal(self, signum: int) -> None:
        self._signum = signum


def _without_result(codes: list[int], context: Context, is_cut: bool, log: Path) -> Result:
    """Return the result of a check whose process was killed at its deadline, or has ended without a result."""
    if codes:
        return Result(FAIL, f"its process {processes.how_it_ended(codes[0])}: {_last_line(log)}", f"see {log}")
    if is_cut:
        return Result(SKIPPED, f"not done when --minutes was over, after {context.limit_s:.0f} s: give more minutes")
    return Result(
        FAIL,
        f"no answer within {context.limit_s:.0f} s",
        f"something hangs; see {log}, nvidia-smi and dmesg, then run it again with --only {context.check}",
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
