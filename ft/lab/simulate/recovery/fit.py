"""From measured rebuilds to others: a straight line through groups and connections, and how far off it is.

    time = a + b groups + c connections,   a, b, c >= 0

fitted three times over the same rows: to the time of all ranks together on the cores of this machine, to the processor
time of the rank that has most to do, and to that of the store that all meet in. The last two together are what is left
where every rank has a core of its own. Relative errors are minimised, or the largest rows would decide alone.

Beyond the largest measured row all of it is extrapolation: nothing here knows of a real network, of NCCL, or of what
begins to matter only with thousands of ranks.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from ft.base.errors import UserError
from ft.lab.simulate.recovery.loss import Work

_NUMBERS = ("ranks", "groups", "memberships", "connections", "most_groups", "most_connections")
_TIMES = ("wall_s", "busiest_cpu_s", "store_cpu_s")
_FIX = "make it with: python tools/bench/rebuild.py --all, or leave --results out and give --measure"


@dataclass(frozen=True)
class Line:
    """A fitted time.

    Attributes:
        target: of ``_TIMES``. features: fields of ``Work`` that it is linear in. constant_s, slopes_s: coefficients.
        errors: fitted / measured - 1 of every row.
    """

    target: str
    features: tuple[str, ...]
    constant_s: float
    slopes_s: tuple[float, ...]
    errors: tuple[float, ...]

    def at(self, work: Work) -> float:
        """Seconds that it gives for ``work``; none where there is nothing to do."""
        if not work.groups:
            return 0.0
        parts = (s * getattr(work, name) for s, name in zip(self.slopes_s, self.features, strict=True))
        return self.constant_s + sum(parts)

    @property
    def typical_error(self) -> float:
        """Root of the mean squared relative error."""
        return float(numpy.sqrt(numpy.mean(numpy.square(self.errors))))

    @property
    def largest_error(self) -> float:
        return max(abs(error) for error in self.errors)


@dataclass(frozen=True)
class Fit:
    """The three lines, and what they were fitted to.

    Attributes:
        here: of all ranks on this machine's cores. busiest, store: processor times. rows: as read.
        checked: relative error on the rows of the most ranks of a fit to all others; None where that leaves too few.
    """

    here: Line
    busiest: Line
    store: Line
    rows: list[dict[str, Any]]
    checked: float | None

    @property
    def most_ranks(self) -> int:
        return max(row["ranks"] for row in self.rows)

    def spread_out(self, work: Work) -> float:
        """Seconds with a core for every rank: the busiest rank's computing and the store's, one after the other."""
        return self.busiest.at(work) + self.store.at(work)

    def measured(self, ranks: int, kind: str, work: Work) -> float | None:
        """Seconds of the row that is just this, None where it was not measured."""
        for row in self.rows:
            same = all(row[name] == getattr(work, name) for name in _NUMBERS[1:])
            if same and row["ranks"] == ranks and row["kind"] == kind:
                return row["wall_s"]
        return None


def fit(rows: Sequence[dict[str, Any]]) -> Fit:
    """Fits all three lines.

    Raises:
        UserError: there are too few rows.
    """
    rows = [row for row in rows if row["groups"]]
    if len(rows) < 4 or len({row["connections"] for row in rows}) < 3:
        raise UserError(f"{len(rows)} measured rebuilds, which are too few to fit", _FIX)
    here = line(rows, "wall_s", ("memberships", "connections"))
    busiest = line(rows, "busiest_cpu_s", ("most_groups", "most_connections"))
    store = line(rows, "store_cpu_s", ("memberships", "connections"))
    return Fit(here, busiest, store, rows, _check(rows))


def line(rows: Sequence[dict[str, Any]], target: str, features: tuple[str, ...]) -> Line:
    """Least squares of relative errors without negative coefficients.

    With so few columns that is found by trying every set of columns that may be other than zero.
    """
    times = numpy.array([row[target] for row in rows], dtype=float)
    columns = numpy.array([[1.0, *(row[name] for name in features)] for row in rows], dtype=float)
    best, least = numpy.zeros(columns.shape[1]), numpy.inf
    for chosen in itertools.product((False, True), repeat=columns.shape[1]):
        if not any(chosen):
            continue
        found = numpy.zeros(columns.shape[1])
        scaled = columns[:, chosen] / times[:, None]
        found[list(chosen)] = numpy.linalg.lstsq(scaled, numpy.ones(len(times)), rcond=None)[0]
        error = float(numpy.sum((columns @ found / times - 1) ** 2))
        if found.min() >= 0 and error < least:
            best, least = found, error
    errors = columns @ best / times - 1
    return Line(target, features, float(best[0]), tuple(map(float, best[1:])), tuple(map(float, errors)))


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a results file, those of other benchmarks left out.

    Raises:
        UserError: it cannot be read, or a row is torn.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"the results cannot be read: {error}", _FIX) from error
    rows = []
    for number, text in enumerate(lines, start=1):
        try:
            row = json.loads(text)
            if row.get("bench") == "rebuild":
                rows.append(_sound(row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"line {number} of {path} is no measurement: {error}", _FIX) from error
    return rows


def _sound(row: dict[str, Any]) -> dict[str, Any]:
    whole = all(isinstance(row[name], int) and row[name] >= 0 for name in _NUMBERS)
    if not whole or not all(row[name] > 0 for name in _TIMES) or not isinstance(row["kind"], str):
        raise ValueError("numbers are missing or make no sense")
    return row


def _check(rows: Sequence[dict[str, Any]]) -> float | None:
    most = max(row["ranks"] for row in rows)
    fewer = [row for row in rows if row["ranks"] < most]
    if len(fewer) < 4 or len({row["connections"] for row in fewer}) < 3:
        return None
    small = line(fewer, "wall_s", ("memberships", "connections"))
    errors = [_of(small, row) / row["wall_s"] - 1 for row in rows if row["ranks"] == most]
    return float(numpy.sqrt(numpy.mean(numpy.square(errors))))


def _of(fitted: Line, row: dict[str, Any]) -> float:
    return fitted.constant_s + sum(s * row[name] for s, name in zip(fitted.slopes_s, fitted.features, strict=True))
