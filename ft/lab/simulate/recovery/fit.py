"""Linear model of the time to rebuild process groups, fitted to measured rebuilds, with its errors.

    time = a + b groups + c connections,   a, b, c >= 0

Each row of measurements is one kind of rebuild in one layout. The model is fitted three times to the same rows: to the
wall time with all ranks on this machine's cores, to the CPU time of the busiest rank, and to the CPU time of the
rendezvous store. The sum of the last two predicts the time with one core per rank. The fit minimizes relative errors;
with absolute errors, the rows with the longest times would dominate.

Predictions beyond the largest measured row are extrapolations: the model does not include a real network, NCCL, or
effects that appear only with thousands of ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from ft.base import bounded_json, files
from ft.base.errors import UserError
from ft.lab.simulate.recovery.loss import Work

_NUMBERS = ("ranks", "groups", "memberships", "connections", "most_groups", "most_connections")
_TIMES = ("wall_s", "busiest_cpu_s", "store_cpu_s")
_FIX = "make it with: python tools/bench/rebuild.py --all, or give --measure instead of --results"


@dataclass(frozen=True)
class Line:
    """One fitted linear model of a time.

    Attributes:
        target: the fitted column, one of ``_TIMES``.
        features: fields of ``Work`` in which the time is linear.
        constant_s: intercept of the model, in seconds.
        slopes_s: seconds per unit of each feature.
        errors: relative error of each row, fitted / measured - 1.
    """

    target: str
    features: tuple[str, ...]
    constant_s: float
    slopes_s: tuple[float, ...]
    errors: tuple[float, ...]

    def at(self, work: Work) -> float:
        """Return the predicted seconds for ``work``; 0 if there are no groups to rebuild."""
        if not work.groups:
            return 0.0
        parts = (s * getattr(work, name) for s, name in zip(self.slopes_s, self.features, strict=True))
        return self.constant_s + sum(parts)

    @property
    def typical_error(self) -> float:
        """Return the root mean square of the relative errors."""
        return float(numpy.sqrt(numpy.mean(numpy.square(self.errors))))

    @property
    def largest_error(self) -> float:
        """Return the largest absolute value of the relative errors."""
        return max(abs(error) for error in self.errors)


@dataclass(frozen=True)
class Fit:
    """The three fitted models and the rows they were fitted to.

    Attributes:
        here: model of the wall time with all ranks on this machine's cores.
        busiest: model of the CPU time of the busiest rank.
        store: model of the CPU time of the rendezvous store.
        rows: the measured rows.
        checked: holdout error: the RMS relative error, on the rows with the most ranks, of a fit to all other rows;
            None if too few rows remain.
    """

    here: Line
    busiest: Line
    store: Line
    rows: list[dict[str, Any]]
    checked: float | None

    @property
    def most_ranks(self) -> int:
        """Return the largest number of ranks in the measurements."""
        return max(row["ranks"] for row in self.rows)

    def spread_out(self, work: Work) -> float:
        """Return the predicted seconds with a core per rank: CPU time of the busiest rank plus that of the store."""
        return self.busiest.at(work) + self.store.at(work)

    def measured(self, ranks: int, kind: str, work: Work) -> float | None:
        """Return the measured wall time in seconds of exactly this rebuild, None if there is no such measurement.

        Args:
            ranks: number of ranks of the layout.
            kind: kind of the rebuild.
            work: groups and connections of the rebuild.
        """
        for row in self.rows:
            same = all(row[name] == getattr(work, name) for name in _NUMBERS[1:])
            if same and row["ranks"] == ranks and row["kind"] == kind:
                return row["wall_s"]
        return None


def fit(rows: Sequence[dict[str, Any]]) -> Fit:
    """Fit all three models to measured rows.

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
    """Return the fit with non-negative coefficients that minimizes the squares of the relative errors.

    There are few columns, so the fit tries every subset of columns with non-zero coefficients.

    Args:
        rows: the measured rows.
        target: column to fit.
        features: columns in which the model is linear.
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
    """Return the rows of a result file of ``tools/bench/rebuild.py``; rows of other benchmarks are left out.

    Raises:
        UserError: the file cannot be read, or a row is malformed.
    """
    try:
        lines = files.read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"the results cannot be read: {error}", _FIX) from error
    rows = []
    for number, text in enumerate(lines, start=1):
        try:
            row = bounded_json.loads(text)
            if row.get("bench") == "rebuild":
                rows.append(_sound(row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"line {number} of {path} is no measurement: {error}", _FIX) from error
    return rows


def _sound(row: dict[str, Any]) -> dict[str, Any]:
    whole = all(isinstance(row[name], int) and row[name] >= 0 for name in _NUMBERS)
    if not whole or not all(row[name] > 0 for name in _TIMES) or not isinstance(row["kind"], str):
        raise ValueError("numbers are missing or invalid")
    return row


def _check(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the holdout error of a fit without the rows with the most ranks, None if too few rows remain."""
    most = max(row["ranks"] for row in rows)
    fewer = [row for row in rows if row["ranks"] < most]
    if len(fewer) < 4 or len({row["connections"] for row in fewer}) < 3:
        return None
    small = line(fewer, "wall_s", ("memberships", "connections"))
    errors = [_of(small, row) / row["wall_s"] - 1 for row in rows if row["ranks"] == most]
    return float(numpy.sqrt(numpy.mean(numpy.square(errors))))


def _of(fitted: Line, row: dict[str, Any]) -> float:
    return fitted.constant_s + sum(s * row[name] for s, name in zip(fitted.slopes_s, fitted.features, strict=True))
