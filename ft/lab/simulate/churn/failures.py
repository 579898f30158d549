"""Failure times of pipeline stages in ``ft simulate churn``: a Poisson process per stage, or a recorded trace."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ft.base import files
from ft.base.errors import UserError

_FIX = "give lines of: seconds from the start, stage"


def hourly(probability: float) -> float:
    """Return the failure rate, per second, of a stage that fails within an hour with this probability (less than 1)."""
    return -math.log1p(-probability) / 3600.0


class Failures(Protocol):
    """The failures of the whole pipeline, for several seeds at once.

    Attributes:
        between_s: mean seconds between two failures anywhere, infinite if there are none.
    """

    between_s: float

    def more(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the next failures in order of time.

        Returns:
            The times in seconds, float [seeds, n], and the stages, int [seeds, n]. An infinite time means that no
            failure follows.
        """


class Poisson:
    """Independent memoryless failures, at the same rate for every stage.

    The failures of a seed depend only on that seed, neither on the number of seeds nor on the strategy, so that all
    strategies are simulated with the same failures.

    Args:
        probability: probability that one stage fails within an hour, from 0 to less than 1.
        stages: number of stages of the pipeline.
        seeds: seeds, one for each simulated run.
    """

    _BLOCK = 256

    def __init__(self, probability: float, stages: int, seeds: range):
        self._stages = stages
        self.between_s = 1.0 / (hourly(probability) * stages) if probability else math.inf
        self._draw = [np.random.default_rng(seed) for seed in seeds]
        self._at = np.zeros((len(seeds), 1))

    def more(self) -> tuple[np.ndarray, np.ndarray]:
        if math.isinf(self.between_s):
            return np.full((len(self._draw), 1), np.inf), np.zeros((len(self._draw), 1), dtype=int)
        gaps = np.stack([draw.exponential(1.0, self._BLOCK) for draw in self._draw]) * self.between_s
        times = self._at + gaps.cumsum(axis=1)
        self._at = times[:, -1:]
        return times, np.stack([draw.integers(self._stages, size=self._BLOCK) for draw in self._draw])


@dataclass(frozen=True)
class Trace:
    """Recorded failures of one run. No failure follows the last recorded one.

    Attributes:
        times: times of the failures in seconds from the start, ascending.
        stages: number of the stage that fails at each of ``times``.
    """

    times: tuple[float, ...]
    stages: tuple[int, ...]

    @property
    def between_s(self) -> float:
        """Return the mean number of seconds between failures, over the time up to the last failure."""
        return self.times[-1] / len(self.times) if self.times else math.inf

    def more(self) -> tuple[np.ndarray, np.ndarray]:
        times, stages = (*self.times, math.inf), (*self.stages, 0)
        return np.array([times]), np.array([stages], dtype=int)


def read_trace(path: str | Path, stages: int) -> Trace:
    """Read a CSV file with lines ``time_s,stage`` in any order; the header line is optional, and # starts a comment.

    Args:
        path: path of the file.
        stages: number of stages of the pipeline.

    Raises:
        UserError: the file cannot be read, a line is not a failure of one of ``stages`` stages, or there is no failure.
    """
    try:
        lines = files.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the trace {path} cannot be read: {error}", "give a CSV file") from error
    found = []
    for place, cells in enumerate(csv.reader(line.partition("#")[0] for line in lines), 1):
        cells = [cell.strip() for cell in cells]
        if any(cells) and (found or cells != ["time_s", "stage"]):
            found.append(_failure(cells, stages, f"line {place} of {path}"))
    if not found:
        raise UserError(f"the trace {path} contains no failure", _FIX)
    found.sort()
    times, places = zip(*found, strict=True)
    return Trace(times, places)


def _failure(cells: list[str], stages: int, where: str) -> tuple[float, int]:
    try:
        at, stage = float(cells[0]), int(cells[1])
    except (ValueError, IndexError):
        at, stage = math.nan, -1
    if len(cells) != 2 or not 0 <= at < math.inf:
        raise UserError(f"{where} is {','.join(cells)!r}", _FIX)
    if not 0 <= stage < stages:
        raise UserError(f"{where} names stage {stage}", f"the stages are 0 to {stages - 1}")
    return at, stage
