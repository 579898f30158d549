"""Simulate every case of a scenario of ``ft simulate churn``: each recovery strategy at each failure rate."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ft.lab.simulate.churn.run import Outcome, run
from ft.lab.simulate.churn.scenario import Scenario
from ft.lab.simulate.churn.strategy import NEVER, Strategy, strategy

LOW, HIGH = 0.1, 0.9
"""Quantiles of the training hours that are shown."""


@dataclass(frozen=True)
class Row:
    """Results of one strategy at one failure rate; numbers are means over the seeds.

    Attributes:
        strategy: key of the strategy.
        rate: hourly failure probability of a stage; None: the failures are those of the trace.
        every: number of iterations between checkpoints; None: there are no checkpoints.
        hours: hours to the target loss, over the runs that reached it; None: no run reached it.
        low: quantile :data:`LOW` of the hours; None if the run at this quantile was given up.
        high: quantile :data:`HIGH` of the hours; None if the run at this quantile was given up.
        iterations: number of iterations executed, repeated ones included.
        iteration_s: total time per executed iteration in seconds, stalls included; None if no iteration was executed.
        failures: number of failures.
        falls: number of rollbacks to a checkpoint.
        undone: number of iterations lost in rollbacks.
        given_up: number of runs that were given up.
        published: published hours to the target loss, or None.
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
    """Yield the results of every strategy at every failure rate, or with the failures of the trace.

    Raises:
        UserError: the trace cannot be read.
    """
    for rate in asked.rates or (None,):
        for key in asked.strategies:
            yield row(asked, key, rate)


def row(asked: Scenario, key: str, rate: float | None) -> Row:
    """Simulate one strategy at one failure rate (None: the trace), and return its means."""
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
    """Simulate one strategy, and return its parameters and its outcome for all seeds.

    Args:
        asked: the scenario.
        key: key of the strategy.
        rate: hourly failure probability of a stage; None: the failures are those of the trace.
        told: whether to record the loss curve of the first seed.
    """
    failures = asked.failures(rate)
    how = strategy(key, asked.costs, failures.between_s)
    return how, run(how, asked.law, failures, asked.limit * asked.plain_s, asked.seeds, told)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
