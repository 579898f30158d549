"""What all simulations share: virtual time, threads of processes, networks, kinds of faults, and the play of a history.

A history is one simulated run. Its world holds all that is simulated; faults and everything else that is left to chance
are drawn from the seed, so that the same seed gives the same history on any machine.
"""

import heapq
import math
import random
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Hashable
from dataclasses import dataclass, field
from typing import Any


class Violation(BaseException):
    """A property does not hold. The message names the property and the values that violate it.

    It is no ``Exception``, so that no handler in the production code under test catches it.
    """


# --- time and threads -------------------------------------------------------------------------------------------------


class Timeline:
    """The event queue of a simulation. Events due at the same time run in the order in which they were scheduled.

    Attributes:
        now: true time, in virtual seconds since the beginning; no component of the simulated system can read it.
    """

    def __init__(self):
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._asked = 0

    @property
    def next_at(self) -> float:
        """Return the time of the next event, infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule ``action(*arguments)`` for ``seconds`` from now."""
        self._asked += 1
        heapq.heappush(self._heap, (self.now + seconds, self._asked, action, arguments))

    def turn(self) -> bool:
        """Run the next event. Return False if there is none."""
        if not self._heap:
            return False
        self.now, _, action, arguments = heapq.heappop(self._heap)
        action(*arguments)
        return True


@types.coroutine
def pause(seconds: float | None) -> Generator[float | None, None, None]:
    """Let a simulated thread be busy for ``seconds`` virtual seconds; None: let it wait until it is poked."""
    yield seconds


class Signal:
    """An event that happens once, with a value; threads await it."""

    def __init__(self):
        self.is_set, self._value = False, None
        self._waiting: list[Thread] = []

    def set(self, value: Any = None) -> None:
        if not self.is_set:
            self.is_set, self._value = True, value
            for thread in self._waiting:
                thread.poke()

    def add(self, thread: "Thread") -> None:
        self._waiting.append(thread)

    def __await__(self) -> Generator[Any, None, Any]:
        if not self.is_set:
            yield self
        return self._value


class Thread:
    """A thread of a simulated process: a coroutine that awaits :func:`pause` and :class:`Signal`.

    Args:
        live: what the thread does, as a function that makes the coroutine.
        after: schedules an action in the process: function (virtual seconds, action).
        ended: called with the exit code or the reason of ``SystemExit``, 0 if the thread returns.
        may_run: whether the process runs; when it runs again, somebody has to poke the thread.
    """

    def __init__(
        self,
        live: Callable[[], Coroutine],
        after: Callable[..., None],
        ended: Callable[[Any], None],
        may_run: Callable[[], bool] = lambda: True,
    ):
        self._live, self._after, self._ended, self._may_run = live, after, ended, may_run
        self._coroutine: Coroutine | None = None
        self._is_busy = self._is_poked = False

    def poke(self) -> None:
        """Wake the thread unless it is busy, because something has happened that it may be waiting for."""
        if not self._is_poked:
            self._is_poked = True
            self._after(0.0, self._go_on)

    def _wake(self) -> None:
        self._is_busy = False
        self._go_on()

    def _go_on(self) -> None:
        """Run until the thread is busy, waits or ends."""
        self._is_poked = False
        if self._is_busy or not self._may_run():
            return
        try:
            self._coroutine = self._coroutine or self._live()
            awaited = self._coroutine.send(None)
        except StopIteration:
            self._ended(0)
        except SystemExit as end:
            self._ended(end.code)
        else:
            if isinstance(awaited, Signal):
                awaited.add(self)
            elif awaited is not None:
                self._is_busy = True
                self._after(awaited, self._wake)


# --- networks ---------------------------------------------------------------------------------------------------------


class Network:
    """Which ways of a network are cut, and until when. A way is what a simulation names by any hashable value."""

    def __init__(self, time: Timeline):
        self._time = time
        self._until: dict[Hashable, float] = {}

    def cut(self, way: Hashable, seconds: float) -> None:
        """Let nothing pass for ``seconds`` virtual seconds from now."""
        self._until[way] = max(self.cut_until(way), self._time.now + seconds)

    def cut_until(self, way: Hashable) -> float:
        """Return the true time until which the way is cut, 0 if it never was."""
        return self._until.get(way, 0.0)

    def is_cut(self, way: Hashable) -> bool:
        return self.cut_until(way) > self._time.now


class Lane:
    """One direction of a connection: messages arrive in the order in which they were sent.

    Args:
        time: the clock of the simulation.
        begins_at: true time before which nothing arrives.
    """

    def __init__(self, time: Timeline, begins_at: float = 0.0):
        self._time, self._last = time, begins_at

    def send(self, latency_s: float, arrives: Callable[..., None], *arguments: Any) -> None:
        """Call ``arrives(*arguments)`` after the latency, and after what was sent before has arrived."""
        now = self._time.now
        self._last = max(now + latency_s, self._last)
        self._time.after(self._last - now, arrives, *arguments)


# --- faults and histories ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: name for ``--kinds`` and the report.
        weight: relative frequency.
        strike: function that injects the fault into a world; what it returns is up to the simulation.
    """

    name: str
    weight: float
    strike: Callable[[Any], Any]


def draw(rng: random.Random, kinds: Collection[Kind], names: Collection[str] | None, number: int) -> list[Any]:
    """Return ``number`` kinds of faults by their weights, of those that are named; ``names`` None: of all."""
    chosen = [kind for kind in kinds if names is None or kind.name in names]
    return rng.choices(chosen, [kind.weight for kind in chosen], k=number)


@dataclass(frozen=True)
class Options:
    """What the user asks of all histories.

    Attributes:
        faults: maximum number of faults in one history.
        kinds: names of the kinds of faults to inject; None: all.
        ranks: number of logical ranks, for simulations that draw it; None: draw it.
    """

    faults: int
    kinds: tuple[str, ...] | None = None
    ranks: int | None = None


@dataclass
class History:
    """The result of one simulated run.

    Attributes:
        seed: seed from which the run was drawn.
        outcome: short description of how the run ended, "" if the simulation knows no outcomes.
        violation: the first property that does not hold, "" if all properties hold.
        struck: kinds of the injected faults, or (kind, phase of the control plane).
        seconds: duration of the run in virtual seconds.
        counts: what the simulation's report counts.
        messages: number of messages, by type.
        pauses: kind of fault -> longest time without progress that this kind caused, in virtual seconds.
        lines: event log, empty unless requested.
    """

    seed: int
    outcome: str = ""
    violation: str = ""
    struck: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    counts: Counter = field(default_factory=Counter)
    messages: Counter = field(default_factory=Counter)
    pauses: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


class World:
    """The state of one simulated run. A simulation adds what it simulates.

    Args:
        rng: source of randomness.
        lines: event log to append to, None if no log is needed.

    Attributes:
        time: the virtual clock.
        network: the cuts of the network.
        struck: (true time, kind) of each fault so far.
        calm_at: true time at which the last fault is over.
    """

    _CHECK_EVERY = 64
    """Number of events between two checks of the whole state, because a check after every event would take too long."""

    def __init__(self, rng: random.Random, lines: list[str] | None):
        self.rng, self.lines = rng, lines
        self.time = Timeline()
        self.network = Network(self.time)
        self.struck: list[tuple[float, str]] = []
        self.calm_at = 0.0

    @property
    def has_ended(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        """Begin the run, and schedule the faults."""
        raise NotImplementedError

    def look(self) -> bool:
        """Check now and then that the run goes on; return whether nothing more can happen."""
        raise NotImplementedError

    def ended(self) -> None:
        """Check the end of the run."""

    def sum_up(self, history: History) -> None:
        """Enter the figures of the run into its history."""
        raise NotImplementedError

    def note(self, text: str, *values: Any) -> None:
        """Append a line to the event log."""
        if self.lines is not None:
            self.lines.append(f"{self.time.now:10.4f}  {text.format(*values)}")

    def lasts(self, seconds: float) -> None:
        """Note that a fault lasts for ``seconds`` virtual seconds from now."""
        self.calm_at = max(self.calm_at, self.time.now + seconds)

    def play(self) -> None:
        """Play the run to its end.

        Raises:
            Violation: a property does not hold.
        """
        self.start()
        turns = 0
        while not self.has_ended:
            if not self.time.turn():
                raise Violation("no event is left, but the run has not ended")
            turns += 1
            if turns % self._CHECK_EVERY == 0 and self.look():
                break
        self.ended()


def play(history: History, world: World) -> History:
    """Play a world, and return its history with the figures and the violation, if there is one.

    An exception of the production code is a violation, too.
    """
    try:
        world.play()
    except Violation as violation:
        history.violation = str(violation)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        history.violation = f"{type(error).__name__} in {where.name}, line {where.lineno}: {error}"
    history.seconds = world.time.now
    world.sum_up(history)
    return history
