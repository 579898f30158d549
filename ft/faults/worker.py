"""Injector of the faults of one worker: the worker announces each fault, then inflicts it on itself."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ft.faults.acts import ACTS, IN_TRAINING
from ft.faults.alarm import Alarm
from ft.faults.faults import RECOVERY_PHASES, STEP_PHASES, Fault, planned

MOST_SLEEP_S = 10.0
"""Maximum extra duration of a slow step, in seconds."""

_UNMEASURED_STEP_S = 0.1
"""Assumed duration in seconds of a step that was not measured."""


class Actions(Protocol):
    """Faults that need the internals of the worker's session."""

    def act(self, fault: Fault) -> None:
        """Carry out ``fault``, of a kind that is not in ``ft.faults.acts``."""


class Injector:
    """Carries out the planned faults of one logical rank, in the worker that holds it.

    Args:
        faults: planned faults of the whole run.
        rank: logical rank of this worker.
        node: node of this worker.
        fired: numbers of the faults that have happened; a repeated step has no fault the second time.
        announce: called before each fault; returns once the fault is recorded. After a SIGKILL the worker could not
            report.
        actions: carries out the faults that need the worker's session.
        began: wall-clock time in seconds at which training began; default: now.
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
            f
            for f in faults
            if not f.is_injected_by_agent and (f.rank == rank or (f.node is not None and f.node == node))
        ]
        self._pending: list[Fault] = []
        self._steps = {fault.number: fault.step for fault in faults}
        self._slowdown = _Slowdown()
        self._planned: dict[tuple[str, int], list[Fault]] = {}
        self._alarm: Alarm | None = None
        self._arm(time.time() if began is None else began)
        # Lets ``at`` return at once if no fault is planned for this worker.
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
        """Return an injector for the faults in the file that ``FT_FAULTS`` names.

        The variable ``FT_BEGAN`` holds the wall-clock time at which training began; default: now.
        """
        began = environment.get("FT_BEGAN")
        return cls(planned(environment), rank, node, fired, announce, actions, None if began is None else float(began))

    def has(self, phase: str) -> bool:
        """Return whether a fault in ``phase`` of some step is still to come on this worker."""
        with self._lock:
            return any(f.phase == phase and f.step is not None and f.number not in self._fired for f in self._mine)

    def update(self, fired: Iterable[int]) -> None:
        """Add the numbers of faults that have happened, as an ``Open`` order (which opens an epoch) lists them."""
        with self._lock:
            self._fired |= set(fired)

    def at(self, phase: str, step: int) -> None:
        """Carry out the faults that are due at ``phase`` of ``step`` (counted from 1).

        Raises:
            Exception: the exception that a planned fault raises.
        """
        if not self.is_armed:
            return
        if phase == "between":
            self._slowdown.step_begins()
        # "transfer" is excluded because a worker also passes it at the end of a recovery, outside of any step.
        while self._pending and phase in STEP_PHASES and phase != "transfer":
            self._do(self._pending.pop(0))
        for fault in self._due(phase, step):
            self._fire(fault)

    def close(self) -> None:
        """Stop the timer for faults with a time."""
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

    def _due(self, phase: str, step: int) -> Sequence[Fault]:
        """Return the faults that are due at this point.

        In a recovery, ``step`` may be too small: a worker that has just taken over a logical rank does not know the
        step of the run. The run has at least reached the step of the latest fault that has happened.
        """
        if phase not in RECOVERY_PHASES:
            return self._planned.get((phase, step), ())
        with self._lock:
            latest = max([step, *(self._steps[number] or 0 for number in self._fired if number in self._steps)])
            return [f for f in self._mine if f.phase == phase and f.number not in self._fired and f.step <= latest]

    def _fire(self, fault: Fault) -> None:
        with self._lock:
            if fault.number in self._fired:
                return
            self._fired.add(fault.number)
        self._announce(fault)
        if fault.step is None and fault.kind in IN_TRAINING:
            self._pending.append(fault)  # on the timer's thread; the training thread carries it out
        else:
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        if fault.kind == "slow":
            self._slowdown.start(fault.factor, fault.seconds)
        elif fault.kind in ACTS:
            ACTS[fault.kind](fault)
        else:
            self._actions.act(fault)


class _Slowdown:
    """Makes steps last ``factor`` times as long for a while, by sleeping at the start of each step."""

    def __init__(self):
        self._factor, self._until = 1.0, 0.0
        self._began: float | None = None

    def start(self, factor: float, seconds: float) -> None:
        self._factor, self._until = factor, time.monotonic() + seconds

    def step_begins(self) -> None:
        """Sleep for ``factor - 1`` times the duration of the last step, if a slowdown is active."""
        now = time.monotonic()
        if now < self._until:
            last = now - self._began if self._began is not None else _UNMEASURED_STEP_S
            time.sleep(min(last * (self._factor - 1.0), MOST_SLEEP_S, self._until - now))
        self._began = time.monotonic()
