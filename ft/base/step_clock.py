"""Measures what the training thread of this process does in each step: compute, wait for others, load data and so on.

The training thread calls :meth:`StepClock.switch` whenever it begins something else; the time until the next call
counts for that. So every moment of a step belongs to exactly one part, also when parts are nested: a garbage collection
inside a wait is no wait.

On a GPU the host does not wait for other ranks, but the GPU does. What measures that passes it on as a function
(``StepClock.cut_device``), because nothing on this floor knows GPUs.
"""

import gc
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

COMPUTE, DATA, GARBAGE, STORAGE, EVALUATION = "compute", "data", "garbage collection", "storage", "evaluation"
OWN = (COMPUTE, DATA, GARBAGE, STORAGE, EVALUATION)
"""The parts of a step that are the rank's own work. All others are waits, named after what is waited for."""
WARM_UP = 5
"""Number of steps after a start or a recovery that are not counted: compilation, first allocations, cold caches."""
BLOCK = 10
"""Number of steps whose times are reported together."""
_LEAST_S = 0.1
"""A block is not complete before this time, so that very short steps do not cause many reports."""
_MOST_OPEN, _MOST_BLOCKS = 100, 100

CutDevice = Callable[[float], Callable[[], Mapping[str, float] | None] | None]
"""Function called at the end of a step with its duration in seconds. It returns a function that returns the seconds
for which the GPU has waited in the step, by name of the process group, or None while that is not known yet. If nothing
was measured in the step, it returns None.
"""

T = TypeVar("T")


@dataclass
class StepBlock:
    """The times of several steps.

    Attributes:
        step_s: duration of each step in seconds.
        own_s: the part of each step in which this rank did not wait for others, in seconds.
        parts: sum over the steps of the time in each part of ``OWN``, in seconds.
        waits: sum over the steps of the time in each wait, in seconds, by name of what was waited for.
    """

    epoch: int
    steps: list[int] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, step: int, spent: Mapping[str, float], stalls: Mapping[str, float]) -> None:
        """Add a step.

        Args:
            spent: seconds that the training thread has spent in each part.
            stalls: seconds for which the GPU has waited, by name. The host computes or waits for the GPU meanwhile, so
                they are taken from the time in ``COMPUTE``.
        """
        whole, stalled = sum(spent.values()), sum(stalls.values())
        waited = sum(seconds for part, seconds in spent.items() if part not in OWN)
        self.steps.append(step)
        self.step_s.append(whole)
        self.own_s.append(max(0.0, whole - waited - stalled))
        for part, seconds in spent.items():
            (self.parts if part in OWN else self.waits)[part] += seconds
        for name, seconds in stalls.items():
            self.waits[name] += seconds
        self.parts[COMPUTE] = max(0.0, self.parts[COMPUTE] - stalled)


class StepClock:
    """The clock. Only the training thread measures; calls from other threads do nothing.

    Attributes:
        cut_device: see :data:`CutDevice`; None: this process uses no GPU, or nothing measures it.
        blocks: complete blocks that nobody has taken yet; another thread may take them with ``popleft``.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._thread = clock, 0
        self.is_running = False
        self.cut_device: CutDevice | None = None
        self.blocks: deque[StepBlock] = deque(maxlen=_MOST_BLOCKS)
        self._part, self._since = COMPUTE, 0.0
        self._spent: dict[str, float] = defaultdict(float)
        self._before_wait: str | None = None
        self._before_collection: str | None = None
        self._epoch = self._skip = 0
        self._is_in_step = False
        self._open: deque[tuple[int, dict[str, float], Callable[[], Mapping[str, float] | None] | None]] = deque()
        self._block = StepBlock(0)

    def start(self) -> None:
        """Measure the steps of the calling thread from now on."""
        self._thread, self.is_running = threading.get_ident(), True
        if self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)

    def stop(self) -> None:
        """Measure nothing any more."""
        self.is_running = False
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    @property
    def measures_here(self) -> bool:
        """Return whether the calling thread is the one whose steps are measured."""
        return self.is_running and threading.get_ident() == self._thread

    # --- parts of a step ----------------------------------------------------------------------------------------------

    def switch(self, part: str | None) -> str | None:
        """Count the time from now on for ``part``, and return the part until now.

        Return None, which this method accepts as well, if nothing is measured in this thread.
        """
        if part is None or not self.is_running or threading.get_ident() != self._thread:
            return None
        before, now = self._part, self._clock()
        self._spent[before] += now - self._since
        self._part, self._since = part, now
        return before

    def during(self, part: str, work: Callable[..., T], *args: object) -> T:
        """Return ``work(*args)``, whose time counts for ``part``."""
        before = self.switch(part)
        try:
            return work(*args)
        finally:
            self.switch(before)

    def begins_to_wait(self, name: str) -> None:
        """Note that the calling thread waits in process group ``name`` from now on."""
        if (before := self.switch(name)) is not None and self._before_wait is None:
            self._before_wait = before

    def has_waited(self) -> None:
        """Note that the wait is over."""
        if self._before_wait is not None and self.switch(self._before_wait) is not None:
            self._before_wait = None

    def _on_collection(self, phase: str, info: object) -> None:
        if phase == "start":
            self._before_collection = self.switch(GARBAGE) or self._before_collection
        elif self._before_collection is not None and self.switch(self._before_collection) is not None:
            self._before_collection = None

    # --- steps --------------------------------------------------------------------------------------------------------

    def begins(self, epoch: int) -> None:
        """Note that training begins in ``epoch``. The first steps are not counted."""
        if not self.measures_here:
            return
        self._epoch, self._skip, self._block = epoch, WARM_UP, StepBlock(epoch)
        self._open.clear()
        self.blocks.clear()
        self._begin_step()

    def ends_step(self, step: int) -> None:
        """Record the end of the training step with the number ``step``, and the beginning of the next one."""
        if not self._is_in_step or not self.measures_here:
            return
        self.switch(COMPUTE)
        spent, whole_s = self._spent, sum(self._spent.values())
        known = None if self.cut_device is None else self.cut_device(whole_s)
        if self._skip > 0:
            self._skip -= 1
        elif self.cut_device is None or known is not None:
            self._open.append((step, spent, known))
        self._begin_step()
        self._close_steps()

    def pauses(self) -> None:
        """Note that no step is under way; the time until the next ``begins`` is not counted."""
        self._is_in_step = False

    def _begin_step(self) -> None:
        self._spent, self._is_in_step = defaultdict(float), True
        self._part, self._since, self._before_wait = COMPUTE, self._clock(), None

    def _close_steps(self) -> None:
        """Put the steps whose times are complete into the block."""
        while self._open:
            step, spent, known = self._open[0]
            stalls: Mapping[str, float] | None = {} if known is None else known()
            if stalls is None and len(self._open) <= _MOST_OPEN:
                return
            self._open.popleft()
            if stalls is not None:
                self._block.add(step, spent, stalls)
            if len(self._block.steps) >= BLOCK and sum(self._block.step_s) >= _LEAST_S:
                self.blocks.append(self._block)
                self._block = StepBlock(self._epoch)


CLOCK = StepClock()
"""The clock of this process."""
