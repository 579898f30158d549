"""Run every case of a scenario over its seeds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ft.lab.simulate.churn.run import Outcome, run
from ft.lab.simulate.churn.scenario import Scenario
from ft.lab.simulate.churn.strategy import NEVER, Strategy, strategy

LOW, HIGH = 0.1, 0.9
"""The quantiles shown."""


@dataclass(frozen=True)
class Row:
    """Results of one strategy at one failure rate; numbers are means over the seeds.

    Attributes:
        strategy: key of the strategy.
        rate: hourly failure probability; None: the trace.
        every: iterations between checkpoints; None: there are none.
        hours: hours to the target, over the runs that reached it; None: none did.
        low: quantile :data:`LOW` of the hours; None if that run was given up.
        high: quantile :data:`HIGH` of the hours; None if that run was given up.
        iterations: iterations executed, repeated ones included.
        iteration_s: total time per executed iteration, stalls included; None if no iteration was executed.
        failures: number of failures.
        falls: number of rollbacks to a checkpoint.
        undone: iterations lost in rollbacks.
        given_up: number of runs that were given up.
        published: published hours to the target, or None.
    """

    strategy: str
    rate: float | None
    every: int | None
    hours: float | None
    low: float | None
    high: float | None
    iterations: float
    iteration_s: float | None
    failures: float
    falls: float
    undone: float
    given_up: int
    published: float | None


def study(asked: Scenario) -> Iterator[Row]:
    """Yield every case of a scenario, rate by rate, or those of the trace.

    Raises:
        UserError: the trace cannot be read.
    """
    for rate in asked.rates or (None,):
        for key in asked.strategies:
            yield row(asked, key, rate)


def row(asked: Scenario, key: str, rate: float | None) -> Row:
    """Run one case."""
    how, found = outcome(asked, key, rate)
    reached = np.isfinite(found.hours)
    low, high = (_finite(each) for each in np.quantile(found.hours, [LOW, HIGH], method="nearest"))
    hours = float(found.hours[reached].mean()) if reached.any() else None
    lasted = np.where(reached, found.hours, asked.limit * asked.plain_s / 3600.0)
    return Row(
        strategy=key,
        rate=rate,
        every=how.interval if how.interval < NEVER else None,
        hours=hours,
        low=low,
        high=high,
        iterations=float(found.executed.mean()),
        iteration_s=float(3600.0 * lasted.sum() / found.executed.sum()) if found.executed.any() else None,
        failures=float(found.failures.mean()),
        falls=float(found.falls.mean()),
        undone=float(found.undone.mean()),
        given_up=int((~reached).sum()),
        published=asked.published.get((key, rate)),
    )


def outcome(asked: Scenario, key: str, rate: float | None, told: bool = False) -> tuple[Strategy, Outcome]:
    """Return the strategy and its outcome over all seeds. ``told``: whether to record the history of the first seed."""
    failures = asked.failures(rate)
    how = strategy(key, asked.costs, failures.between_s)
    return how, run(how, asked.law, failures, asked.limit * asked.plain_s, asked.seeds, told)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
