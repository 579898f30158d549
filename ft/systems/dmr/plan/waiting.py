"""The queue of verifications that wait, at run time: what is put in, and what is executed when.

Each decision costs about the logarithm of the queue's length: thousands of operators may wait in a stage without
windows.
"""

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An operator whose verification waits, with the bytes that wait with it."""

    op: str
    check_us: float
    bytes: float


class Waiting:
    """Entries in the order in which they came. Every method that returns entries has taken them out.

    Args:
        entries: what waits already, oldest first.
    """

    def __init__(self, entries: Iterable[Entry] = ()):
        self._entries: dict[str, Entry] = {}
        self._by_time: list[tuple[float, int, Entry]] = []
        self._holding: list[tuple[float, str, Entry]] = []
        self._number: dict[str, int] = {}
        self._came = 0
        self.held = 0.0
        for entry in entries:
            self.put(entry)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, op: str) -> bool:
        return op in self._entries

    def put(self, entry: Entry) -> None:
        """One more waits."""
        self._came += 1
        self._entries[entry.op], self._number[entry.op] = entry, self._came
        # Of equally long ones the oldest stands last, and is taken first.
        bisect.insort(self._by_time, (entry.check_us, -self._came, entry))
        if entry.bytes:
            bisect.insort(self._holding, (entry.check_us, entry.op, entry))
            self.held += entry.bytes

    def take(self, op: str) -> Entry:
        """This one does not wait any longer.

        Raises:
            KeyError: it does not wait.
        """
        entry = self._entries.pop(op)
        number = self._number.pop(op)
        del self._by_time[bisect.bisect_left(self._by_time, (entry.check_us, -number))]
        if entry.bytes:
            del self._holding[bisect.bisect_left(self._holding, (entry.check_us, op))]
            # Sums of sizes that are not whole numbers are not exact.
            self.held = self.held - entry.bytes if self._holding else 0.0
        return entry

    def press(self, headroom: float, longest_us: float = math.inf) -> list[Entry]:
        """What is executed at once so that the rest fits ``headroom`` bytes.

        Args:
            longest_us: the longest window that will come soon. What fits none of them would keep its memory for long,
                and goes first, the longest first; then what is lost least by, the shortest first.
        """
        forced = []
        while self.held > headroom and self._holding:
            last, first = self._holding[-1][2], self._holding[0][2]
            forced.append(self.take((last if last.check_us > longest_us else first).op))
        return forced

    def fill(self, dur_us: float) -> list[Entry]:
        """The subset that best fits a window of known length, longest first (0.975 of the room; exact: 0.976)."""
        chosen = []
        while place := bisect.bisect_right(self._by_time, dur_us, key=lambda each: each[0]):
            entry = self.take(self._by_time[place - 1][2].op)
            chosen.append(entry)
            dur_us -= entry.check_us
        return chosen

    def oldest(self, at_most_us: float = math.inf) -> Entry | None:
        """The one that has kept memory longest, of those that take no longer than that; None: there is none."""
        if not self._by_time or self._by_time[0][0] > at_most_us:
            return None
        return self.take(next(entry.op for entry in self if entry.check_us <= at_most_us))
