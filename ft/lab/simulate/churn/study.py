"""A scenario's cases, each over its seeds."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ft.lab.simulate.churn.run import Outcome, run
from ft.lab.simulate.churn.scenario import Scenario
from ft.lab.simulate.churn.strategy import NEVER, Strategy, strategy

LOW, HIGH = 0.1, 0.9
"""The quantiles that are shown."""


@dataclass(frozen=True)
class Row:
    """One strategy at one rate; means over the seeds.

    Attributes:
        strategy: its key. rate: None: the trace. hours: to the target, of the runs that reached it; None: none did.
        every: iterations between checkpoints, None: there are none.
        low, high: quantiles :data:`LOW` and :data:`HIGH`, None where that run was given up.
        iterations: with those done again. iteration_s: time by iterations, with the stalls; None where there was none.
        failures, falls: numbers of them. undone: iterations that were lost. given_up: number of runs.
        published: hours that somebody else found, or None.
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
    """Every case of a scenario: rate by rate, or the trace.

    Raises:
        UserError: the trace cannot be read.
    """
    for rate in asked.rates or (None,):
        for key in asked.strategies:
            yield row(asked, key, rate)


def row(asked: Scenario, key: str, rate: float | None) -> Row:
    """One case."""
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
    """What was done, and what came of it for each seed. ``told``: with the history of the first."""
    failures = asked.failures(rate)
    how = strategy(key, asked.costs, failures.between_s)
    return how, run(how, asked.law, failures, asked.limit * asked.plain_s, asked.seeds, told)


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
