"""Faults of one worker: it announces each one, and then does it to itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ft.errors import RecoverableError, ReplaceNodeError, UserError
from ft.inject.alarm import Alarm
from ft.inject.faults import Fault, from_json

MOST_SLEEP_S = 10.0
"""A slow step is made at most this much longer."""

_UNSEEN_STEP_S = 0.1
_ERRORS = {
    "recoverable": RecoverableError,
    "software": RuntimeError,
    "node": ReplaceNodeError,
    "user": lambda text: UserError(text, "leave the injected fault out"),
}
# Continues a stopped process after a while; ends at once, without a word, when that process dies (end of file).
_CONTINUE = """
import os, select, signal, sys
ended = select.select([0], [], [], float(sys.argv[2]))[0]
if not ended:
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


class Actions(Protocol):
    """What only the worker's session can break."""

    def drop(self) -> None:
        """Shuts one TCP connection of a process group down."""

    def corrupt(self, copies: str) -> None:
        """Flips one byte of a complete snapshot: of the "own" one, or of a "peer" copy held here."""


class Injector:
    """The planned faults of one logical rank, carried out by the worker that holds it.

    Args:
        faults: of the whole run. rank: the logical rank of this worker. node: its node.
        fired: numbers of the faults that have happened: a step that is redone has no fault the second time.
        announce: called before a fault, returns when the fault is on record: after a SIGKILL nobody can say it.
        actions: what the session does.
        began: wall time at which training began, default now.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        node: str,
        fired: Iterable[int],
        announce: Callable[[Fault], None],
        actions: Actions,
        began: float | None = None,
    ):
        self._lock = threading.Lock()
        self._fired = set(fired)
        self._announce, self._actions = announce, actions
        self._mine = [
            f for f in faults if not f.is_agents and (f.rank == rank or (f.node is not None and f.node == node))
        ]
        self._pending: BaseException | None = None
        self._slowdown = _Slowdown()
        self._planned: dict[tuple[str, int], list[Fault]] = {}
        self._alarm: Alarm | None = None
        self._arm(time.time() if began is None else began)
        # What ``at`` looks at: false for ever where nothing is planned.
        self.is_armed = bool(self._mine)

    @classmethod
    def from_environment(
        cls,
        rank: int,
        node: str,
        fired: Iterable[int],
        announce: Callable[[Fault], None],
        actions: Actions,
        environment: Mapping[str, str] = os.environ,
    ) -> "Injector":
        """With the faults in ``FT_FAULTS``; ``FT_BEGAN`` is the wall time at which training began, default now."""
        began = environment.get("FT_BEGAN")
        faults = from_json(environment.get("FT_FAULTS"))
        return cls(faults, rank, node, fired, announce, actions, None if began is None else float(began))

    def has(self, phase: str) -> bool:
        """A fault in ``phase`` of some step is still to come here."""
        with self._lock:
            return any(f.phase == phase and f.step is not None and f.number not in self._fired for f in self._mine)

    def update(self, fired: Iterable[int]) -> None:
        """Takes over which faults have happened, from an ``Open`` order."""
        with self._lock:
            self._fired |= set(fired)

    def at(self, phase: str, step: int) -> None:
        """The worker is in ``phase`` of ``step`` (the first step is 1).

        Raises:
            RecoverableError, ReplaceNodeError, RuntimeError, UserError: a planned exception.
        """
        if not self.is_armed:
            return
        if phase == "between":
            self._slowdown.step_begins()
        if self._pending is not None and phase != "transfer":
            error, self._pending = self._pending, None
            raise error
        for fault in self._planned.get((phase, step), ()):
            self._fire(fault)

    def close(self) -> None:
        """No fault comes from the clock any more."""
        if self._alarm is not None:
            self._alarm.close()

    def _arm(self, began: float) -> None:
        timed = []
        for fault in self._mine:
            if fault.step is None:
                timed.append(fault)
            else:
                self._planned.setdefault((fault.phase, fault.step), []).append(fault)
        timed = [fault for fault in timed if fault.number not in self._fired]
        if timed:
            self._alarm = Alarm(timed, began, self._fire)

    def _fire(self, fault: Fault) -> None:
        with self._lock:
            if fault.number in self._fired:
                return
            self._fired.add(fault.number)
        self._announce(fault)
        _ACTS[fault.kind](self, fault)

    def _kill(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self, fault: Fault) -> None:
        waker = _wake_later(fault.seconds) if fault.seconds is not None else None
        os.kill(os.getpid(), signal.SIGSTOP)
        if waker is not None:
            waker.stdin.close()
            waker.wait()

    def _raise(self, fault: Fault) -> None:
        error = _ERRORS[fault.error](f"injected fault {fault.number}: {fault}")
        if fault.step is not None:
            raise error
        # A thread cannot raise in another one: the training thread does it at its next point.
        self._pending = error

    def _slow(self, fault: Fault) -> None:
        self._slowdown.start(fault.factor, fault.seconds)

    def _drop(self, fault: Fault) -> None:
        self._actions.drop()

    def _corrupt(self, fault: Fault) -> None:
        self._actions.corrupt(fault.copies)


_ACTS = {
    "kill": Injector._kill,
    "hang": Injector._hang,
    "exception": Injector._raise,
    "slow": Injector._slow,
    "drop": Injector._drop,
    "corrupt-snapshot": Injector._corrupt,
}


class _Slowdown:
    """Makes steps last ``factor`` times as long, for a while, by sleeping at the start of each."""

    def __init__(self):
        self._factor, self._until = 1.0, 0.0
        self._began: float | None = None

    def start(self, factor: float, seconds: float) -> None:
        self._factor, self._until = factor, time.monotonic() + seconds

    def step_begins(self) -> None:
        """Between two steps; sleeps for what the last step took, times ``factor - 1``."""
        now = time.monotonic()
        if now < self._until:
            last = now - self._began if self._began is not None else _UNSEEN_STEP_S
            time.sleep(min(last * (self._factor - 1.0), MOST_SLEEP_S, self._until - now))
        self._began = time.monotonic()


def _wake_later(seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-I", "-S", "-c", _CONTINUE, str(os.getpid()), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
