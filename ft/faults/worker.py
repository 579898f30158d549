"""Faults of one worker: it announces each one, and then does it to itself."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from ft.faults.acts import ACTS, IN_TRAINING
from ft.faults.alarm import Alarm
from ft.faults.faults import RECOVERY_PHASES, STEP_PHASES, Fault, planned

MOST_SLEEP_S = 10.0
"""A slow step is made at most this much longer."""

_UNSEEN_STEP_S = 0.1


class Actions(Protocol):
    """What only the worker's session can break."""

    def act(self, fault: Fault) -> None:
        """Does ``fault``, of a kind that is not in ``ft.faults.acts``."""


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
        self._pending: list[Fault] = []
        self._steps = {fault.number: fault.step for fault in faults}
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
        """With the faults of the file ``FT_FAULTS``; ``FT_BEGAN``: the wall time at which training began, or now."""
        began = environment.get("FT_BEGAN")
        return cls(planned(environment), rank, node, fired, announce, actions, None if began is None else float(began))

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
            Exception: what a planned fault raises.
        """
        if not self.is_armed:
            return
        if phase == "between":
            self._slowdown.step_begins()
        while self._pending and phase in STEP_PHASES and phase != "transfer":
            self._do(self._pending.pop(0))
        for fault in self._due(phase, step):
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

    def _due(self, phase: str, step: int) -> Sequence[Fault]:
        """Those of this point. In a recovery, whoever has just joined does not know the step: it is that of the last
        fault or a later one."""
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
            self._pending.append(fault)  # by the clock's thread: the training thread does it at its next point
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
