"""What a rebuild costs, out of one column of published hours; and the rates at which published hours would be ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ft.base.errors import UserError
from ft.lab.simulate.churn.scenario import Scenario, scenario
from ft.lab.simulate.churn.strategy import CHECKFREE, PLUS
from ft.lab.simulate.churn.study import row

_HALVINGS, _MOST_RATE, _MATCH_HALVINGS = 22, 0.5, 10


@dataclass(frozen=True)
class Fit:
    """``jump`` and ``slowdown``: of the flags of these names. ``rate``: whose hours they were fitted to."""

    rate: float
    jump: float
    slowdown: float


def fit(values: Mapping[str, Any], rate: float) -> Fit:
    """The jump with which CheckFree takes as long as published at ``rate``, then CheckFree+'s slowdown.

    Two numbers out of two: what the same numbers say of other rates is a prediction. The iterations to make a jump good
    are not fitted, for only their product with the jump shows in such hours.

    Args:
        values: of a scenario by the names of its fields.

    Raises:
        UserError: nothing is published at that rate, or no jump or slowdown gives these hours.
    """
    asked = scenario(values)
    for key in (CHECKFREE, PLUS):
        if (key, rate) not in asked.published:
            raise UserError(
                f"nothing to fit {key} to at {100 * rate:.4g} % an hour", "name a rate of the scenario's [published]"
            )
    jump = _solve(values, "jump", CHECKFREE, rate, asked.law.above)
    slowdown = _solve({**values, "jump": jump}, "slowdown", PLUS, rate, 10.0)
    return Fit(rate, jump, slowdown)


def _solve(values: Mapping[str, Any], name: str, key: str, rate: float, most: float) -> float:
    """The value of the field ``name`` that makes the mean hours those published."""

    def late(value: float) -> bool:
        asked = scenario({**values, name: value})
        return _takes_longer(asked, key, rate, asked.published[key, rate])

    if late(0.0):
        raise UserError(
            f"{key} takes longer than published even with {name} 0", "check iteration, exponent and [published]"
        )
    return _halve(late, 0.0, most, _HALVINGS)


def matching_rate(asked: Scenario, key: str, hours: float) -> float | None:
    """The probability within an hour at which a strategy takes ``hours`` here, None if none up to 50 % does."""
    # A run that takes much longer than that need not be played to its end.
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
