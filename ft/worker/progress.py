"""Tracks the progress of a worker and reports it in heartbeats, from which the control plane detects hangs."""

import statistics
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ft.base.step_clock import COMPUTE, EVALUATION, STORAGE, StepClock
from ft.job.messages import Beat

_STEPS_REMEMBERED = 20
_PARTS = {"save": STORAGE, "evaluate": EVALUATION, "rehearsal": EVALUATION}
"""Part of a step (``ft.base.step_clock``) to which the time in a place of kind "aside" belongs; others are waits."""
_SAME_S = 0.05
"""Differences in the start of an operation, in seconds, that the measurement of its age causes."""


class Progress:
    """Progress state, written by the training thread and read by the heartbeat thread.

    No lock is needed, because each field is replaced in one assignment.

    Args:
        waiting: function that returns the collective in which the training thread is blocked, as (name of the process
            group, time of its start on the clock), or None.
        unfinished: function that returns the oldest operation of training that has not ended, as (name of the process
            group, name of the operation, seconds since its start), or None. With NCCL the training thread starts
            operations and goes on: when they hang it blocks later, at the first value that it reads from the device,
            and ``waiting`` does not show it.
        clock: function that returns the monotonic time in seconds.
        times: measures the parts of each step; None: nothing is measured.

    Attributes:
        waiting: see Args.
        unfinished: see Args.
        clock: see Args.
        begun: function that is called when a step begins, with whether all that came since the last call was a whole
            training step, as most are: without an evaluation or a checkpoint, and no failed attempt.
        interrupted: function that is called when something begins in a step that most steps do not contain.
        lag: function that returns the number of steps by which the newest snapshot held by all peers is behind.
        memory: function that returns a number that changes with the files that hold the worker's snapshots.
        epoch: number of the present epoch, -1 before the first.
        step: last committed step.
    """

    def __init__(
        self,
        waiting: Callable[[], tuple[str, float] | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        unfinished: Callable[[], tuple[str, str, float] | None] = lambda: None,
        times: StepClock | None = None,
    ):
        self._times = times
        self.waiting, self.unfinished, self.clock = waiting, unfinished, clock
        self.begun: Callable[[bool], None] = lambda is_usual: None
        self.interrupted: Callable[[], None] = lambda: None
        self._begun_after: int | None = None
        self.lag: Callable[[], int] = lambda: 0
        self.memory: Callable[[], int] = lambda: 0
        self.epoch, self.step = -1, 0
        self._activity: tuple[str, str, float] = ("idle", "start", self.clock())
        self._step_times: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._step_began: float | None = None
        self._aside_s = 0.0
        self._seen_blocked: tuple[str, float] | None = None
        self._moved_at = self.clock()

    @contextmanager
    def at(self, doing: str, where: str) -> Iterator[None]:
        """Return a context in which heartbeats report the given activity.

        Args:
            doing: kind of activity: "compute", "wait" (for other ranks), "aside" (may take longer than a step), "idle"
                (no step is under way).
        """
        before = self._activity
        self._enter(doing, where)
        try:
            yield
        finally:
            self._enter(before[0], before[1])

    def begins(self, step: int) -> None:
        """Record that training continues after the committed step ``step``, and start to measure the time of the next
        step.
        """
        self.step = step
        self._enter("compute", f"step {step + 1}")
        self._step_began, self._aside_s = self._activity[2], 0.0
        self._tell_of_step(step)
        if self._times is not None:
            self._times.begins(self.epoch)

    def committed(self, step: int, is_usual: bool = True) -> None:
        """Record that ``step`` is committed and the next step begins.

        Args:
            is_usual: whether the worker has computed the step as it computes most steps.
        """
        if self._step_began is not None:
            self._step_times.append(self.clock() - self._step_began)
        self.step = step
        self._enter("compute", f"step {step + 1}")
        self._step_began, self._aside_s = self._activity[2], 0.0
        if step != self._begun_after:  # two layers may tell of the same step
            self._tell_of_step(step, is_usual)
        if self._times is not None:
            self._times.ends_step(step)

    def aside(self, what: str) -> None:
        """Record that this worker does ``what``, such as an evaluation, which may take longer than a step."""
        self._enter("aside", what)
        self.interrupted()

    def idles(self, where: str) -> None:
        """Record that no step is under way (``where`` says why), and stop measuring the step time."""
        self._step_began = None
        self._enter("idle", where)
        if self._times is not None:
            self._times.pauses()

    @property
    def doing(self) -> str:
        """Return the present kind of activity; see ``at``."""
        return self._activity[0]

    @property
    def place(self) -> str:
        """Return the description of the present activity."""
        return self._activity[1]

    def step_time(self) -> float | None:
        """Return the median duration of the last steps in seconds, None before the end of the first step."""
        times = list(self._step_times)
        return statistics.median(times) if times else None

    def beat(self) -> Beat:
        doing, where, since = self._activity
        now = self.clock()
        blocked = self._blocked(now)
        # an operation has ended since the last heartbeat, so the worker makes progress
        if not _is_same(blocked, self._seen_blocked):
            self._seen_blocked, self._moved_at = blocked, now
        if doing in ("compute", "aside") and blocked is not None:  # in an evaluation or a save, a wait is a wait, too
            doing, where, since = "wait", *blocked
        elif doing in ("compute", "aside"):
            since = max(since, self._moved_at)
        return Beat(
            age_s=0.0,
            epoch=self.epoch,
            step=self.step,
            doing=doing,
            since_s=round(now - since, 3),
            where=where,
            step_s=self.step_time(),
            lag=self.lag(),
            at_step_s=round(self._at_step_s(now), 3),
            memory=self.memory(),
        )

    def _tell_of_step(self, step: int, is_usual: bool = True) -> None:
        """Tell that a step begins after ``step``, which was a step only if the last one began after the step before."""
        is_next, self._begun_after = self._begun_after == step - 1, step
        self.begun(is_next and is_usual)

    def _enter(self, doing: str, where: str) -> None:
        before, now = self._activity, self.clock()
        if before[0] == "aside":
            self._aside_s += now - before[2]
        self._activity = (doing, where, now)
        if self._times is not None:
            self._times.switch(COMPUTE if doing == "compute" else _PARTS.get(where, where))

    def _at_step_s(self, now: float) -> float:
        began, (doing, _, since) = self._step_began, self._activity
        if began is None:
            return 0.0
        return max(0.0, (since if doing == "aside" else now) - began - self._aside_s)

    def _blocked(self, now: float) -> tuple[str, float] | None:
        """Return the oldest operation that blocks the training thread or has not ended: (name, start)."""
        waiting, unfinished = self.waiting(), self.unfinished()
        if unfinished is None:
            return waiting
        group, operation, age_s = unfinished
        started = (f"{group}, {operation}", now - age_s)
        return started if waiting is None else min(waiting, started, key=lambda one: one[1])


def _is_same(one: tuple[str, float] | None, other: tuple[str, float] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and abs(one[1] - other[1]) < _SAME_S


class Heartbeat:
    """A thread that sends ``progress.beat()`` every ``period_s`` seconds.

    A stopped process (SIGSTOP) sends none, so that the agent detects it.

    Args:
        period_s: time between heartbeats, in seconds.
        others: returns further reports, which are sent after each heartbeat.
    """

    def __init__(
        self,
        progress: Progress,
        send: Callable[[Any], None],
        period_s: float,
        others: Callable[[], Iterable[Any]] = lambda: (),
    ):
        self._progress, self._send, self._period, self._others = progress, send, period_s, others
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            try:
                self._send(self._progress.beat())
                for report in self._others():
                    self._send(report)
            except OSError:  # the receiving thread of the link detects the agent's death, and ends the process
                return
            except Exception:  # a worker without heartbeats would be killed, though only its description has failed
                traceback.print_exc()
