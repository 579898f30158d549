"""Calibration of ``ft simulate churn`` against the training times that CheckFree publishes.

CheckFree rebuilds a lost pipeline stage from its neighbours, which raises the loss by a jump. CheckFree+ also needs
more iterations, because it swaps stages during training (slowdown). This module fits jump and slowdown to published
hours, and finds the failure rates at which the simulation takes the published hours.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ft.base.errors import UserError
from ft.lab.simulate.churn.scenario import Scenario, scenario
from ft.lab.simulate.churn.strategy import CHECKFREE, PLUS
from ft.lab.simulate.churn.study import row

_HALVINGS, _MOST_RATE, _MATCH_HALVINGS = 22, 0.5, 10
"""Bisection steps of a fit; highest hourly failure probability tried, and bisection steps, of a matching rate."""


@dataclass(frozen=True)
class Fit:
    """Fitted parameters of CheckFree and CheckFree+.

    Attributes:
        rate: hourly failure probability of a stage for which the published hours were used.
        jump: value of the flag ``--jump``: increase of the loss when a stage is rebuilt.
        slowdown: value of the flag ``--slowdown``: fraction of additional iterations of CheckFree+.
    """

    rate: float
    jump: float
    slowdown: float


def fit(values: Mapping[str, Any], rate: float) -> Fit:
    """Fit the jump to CheckFree's published hours at ``rate``, then the slowdown to CheckFree+'s published hours.

    Two numbers are fitted to two numbers, so the results at other rates are predictions. The number of iterations in
    which a jump decays is not fitted, because the hours depend only on its product with the jump.

    Args:
        values: field name -> value of a scenario.
        rate: one of the hourly failure probabilities with published hours.

    Raises:
        UserError: nothing is published at that rate, or no jump or slowdown reproduces the hours.
    """
    asked = scenario(values)
    for key in (CHECKFREE, PLUS):
        if (key, rate) not in asked.published:
            raise UserError(
                f"there are no published hours to fit {key} to at {100 * rate:.4g} % an hour",
                "name a rate of the scenario's [published]",
            )
    jump = _solve(values, "jump", CHECKFREE, rate, asked.law.above)
    slowdown = _solve({**values, "jump": jump}, "slowdown", PLUS, rate, 10.0)
    return Fit(rate, jump, slowdown)


def _solve(values: Mapping[str, Any], name: str, key: str, rate: float, most: float) -> float:
    """Return the value of the field ``name`` at which the mean simulated hours equal the published hours, by bisection.

    Args:
        values: field name -> value of the scenario.
        name: name of the field to fit.
        key: key of the strategy.
        rate: hourly failure probability of a stage.
        most: greatest value of the field.
    """

    def late(value: float) -> bool:
        asked = scenario({**values, name: value})
        return _takes_longer(asked, key, rate, asked.published[key, rate])

    if late(0.0):
        raise UserError(
            f"{key} takes longer than published even with {name} 0", "check iteration, exponent and [published]"
        )
    return _halve(late, 0.0, most, _HALVINGS)


def matching_rate(asked: Scenario, key: str, hours: float) -> float | None:
    """Return the hourly failure probability of a stage at which a strategy takes ``hours`` on average; None if there is
    no such probability up to 50 %.
    """
    # A run that has taken three times the published hours need not be simulated to its end.
    sooner = replace(asked, limit=min(asked.limit, 3.0 * hours * 3600.0 / asked.plain_s))

    def late(rate: float) -> bool:
        return _takes_longer(sooner, key, rate, hours)

    if late(0.0) or not late(_MOST_RATE):
        return None
    return _halve(late, 0.0, _MOST_RATE, _MATCH_HALVINGS)


def _takes_longer(asked: Scenario, key: str, rate: float, hours: float) -> bool:
    found = row(asked, key, rate)
    return bool(found.given_up) or found.hours > hours


def _halve(above: Callable[[float], bool], low: float, high: float, times: int) -> float:
    for _ in range(times):
        middle = (low + high) / 2
        low, high = (low, middle) if above(middle) else (middle, high)
    return (low + high) / 2
