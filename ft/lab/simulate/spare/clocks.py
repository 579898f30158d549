"""Failure times of data-parallel groups in the SPARe simulation: one renewal process per group, or a recorded trace.

A group's failure clock is the time of its next failure. A group that is replaced after a failure is called new.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ft.base import files
from ft.base.errors import UserError


class Law(Protocol):
    """The distribution of the failures of a group."""

    def after(self, start: np.ndarray, groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the times of the next failures of groups, in seconds, float [n].

        Args:
            start: time in seconds at which each group is new, float [n].
            groups: numbers of the groups, int [n].
            rng: random generator.
        """


@dataclass(frozen=True)
class Weibull:
    """Weibull-distributed times between the failures of a group; exponential with ``shape`` 1.

    Attributes:
        mean_s: mean seconds between two failures of one group: number of groups times the mean of the whole system.
        shape: shape of the distribution; below 1, new groups fail more often than old groups.
    """

    mean_s: float
    shape: float

    def after(self, start: np.ndarray, groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        scale = self.mean_s / math.gamma(1.0 + 1.0 / self.shape)
        return start + scale * rng.weibull(self.shape, len(groups))


class Trace:
    """Recorded failures. Failures of a group that is already lost are ignored.

    Args:
        failures: (seconds from the start, group), in any order.
    """

    def __init__(self, failures: Sequence[tuple[float, int]]):
        by_group: dict[int, list[float]] = {}
        for at, group in failures:
            by_group.setdefault(group, []).append(at)
        self._times = {group: np.sort(times) for group, times in by_group.items()}

    def after(self, start: np.ndarray, groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        del rng
        return np.array([self._next(float(at), int(group)) for at, group in zip(start, groups, strict=True)])

    def _next(self, start: float, group: int) -> float:
        times = self._times.get(group)
        place = 0 if times is None else int(np.searchsorted(times, start, side="right"))
        return math.inf if times is None or place == len(times) else float(times[place])


def read_trace(path: str | Path, groups: int) -> Trace:
    """Read a text file with lines of ``seconds group`` or ``seconds,group``.

    Empty lines are skipped, and # starts a comment.

    Args:
        path: path of the file.
        groups: number of groups.

    Raises:
        UserError: the file cannot be read, a line is not a failure of one of ``groups`` groups, or there is no failure.
    """
    try:
        lines = files.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the trace {path} cannot be read: {error}", "give a text file") from error
    failures = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if words:
            failures.append(_failure(words, groups, f"line {number} of {path}"))
    if not failures:
        raise UserError(f"the trace {path} contains no failure", "give lines of: seconds group")
    return Trace(failures)


def _failure(words: list[str], groups: int, where: str) -> tuple[float, int]:
    try:
        at, group = float(words[0]), int(words[1])
    except (ValueError, IndexError):
        at, group = math.nan, -1
    if len(words) != 2 or not 0 <= at < math.inf:
        raise UserError(f"{where} is {' '.join(words)!r}", "give two numbers a line: seconds from the start, and group")
    if not 0 <= group < groups:
        raise UserError(f"{where} names group {group}", f"the groups are 0 to {groups - 1}")
    return at, group


class Clocks:
    """The next failure of every group that takes part in the run.

    Args:
        law: distribution of the failures.
        groups: number of groups.
        rng: random generator of this run.

    Attributes:
        due: time in seconds at which each group fails, float [groups]; infinite if the group does not fail again.
    """

    def __init__(self, law: Law, groups: int, rng: np.random.Generator):
        self._law, self._rng, self._all = law, rng, np.arange(groups)
        self.due = law.after(np.zeros(groups), self._all, rng)
        self.sort()

    def sort(self) -> None:
        """Sort the failures by time, and mark all groups as running. Must be called after each change of ``due``."""
        self._order = np.argsort(self.due, kind="stable")
        self._times = [*self.due[self._order].tolist(), math.inf]
        self._place = 0

    @property
    def next(self) -> float:
        """Return the time in seconds at which the next group fails; infinite if none does."""
        return self._times[self._place]

    def failed(self, until: float) -> list[int]:
        """Return the groups that fail up to the time ``until``, in seconds, and mark these groups as lost."""
        begin = self._place
        while self._times[self._place] <= until:
            self._place += 1
        return self._order[begin : self._place].tolist()

    def out(self) -> np.ndarray:
        """Return the groups that have failed since the last :meth:`sort`, int [n]."""
        return self._order[: self._place]

    def renew(self, groups: np.ndarray, start: np.ndarray) -> None:
        """Draw the next failures of groups that are replaced. Call :meth:`sort` afterwards.

        Args:
            groups: numbers of the groups, int [n].
            start: time in seconds at which each group is new, float [n].
        """
        self.due[groups] = self._law.after(start, groups, self._rng)
