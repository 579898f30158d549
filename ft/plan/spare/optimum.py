"""Which redundancy trains fastest: by the rule of thumb, by formula (7), and simulated; one of them is recommended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ft.simulate.spare.scenario import Scenario
from ft.simulate.spare.study import Row, checkpoint_period, endurance
from ft.spare import theory

_ALIKE = 0.005


@dataclass(frozen=True)
class Choice:
    """One redundancy.

    Attributes:
        ttt_norm, availability: by formulas (7) and (2). period_s: formula (1).
        simulated: None where nothing was simulated.
    """

    redundancy: int
    ttt_norm: float
    availability: float
    period_s: float
    simulated: Row | None


@dataclass(frozen=True)
class Optimum:
    """The answer. ``argmin_simulated``: None where nothing was simulated. ``reason``: of the recommendation."""

    choices: tuple[Choice, ...]
    r_star: int
    argmin_theory: int
    argmin_simulated: int | None
    recommended: int
    reason: str

    @property
    def period_s(self) -> float:
        """Of checkpoints with the recommended redundancy."""
        return next(choice.period_s for choice in self.choices if choice.redundancy == self.recommended)


def choice(asked: Scenario, redundancy: int, simulated: Row | None) -> Choice:
    """What the formulas say of a redundancy, beside what was simulated."""
    job, period = asked.job, checkpoint_period(asked, "spare", redundancy)
    interval = endurance(job.groups, "spare", redundancy) * asked.mtbf_s
    share = theory.availability(period, job.save_s, interval, job.restart_s)
    return Choice(redundancy, theory.stack_mean(job.groups, redundancy) / share, share, period, simulated)


def optimum(asked: Scenario, choices: Sequence[Choice]) -> Optimum:
    """Chooses among ``choices``, of which there is one at least."""
    star = theory.r_star(asked.job.groups)
    by_theory = min(choices, key=lambda one: one.ttt_norm)
    by_simulation = min(choices, key=_simulated)
    if not math.isfinite(_simulated(by_simulation)):
        simulated = None if by_simulation.simulated is None else "no simulated run keeps a step"
        reason = f"{simulated or 'nothing was simulated'}; formula (7) is least there"
        return Optimum(tuple(choices), star, by_theory.redundancy, None, by_theory.redundancy, reason)
    found, reason = _recommended(choices, by_simulation, star, by_theory.redundancy)
    return Optimum(tuple(choices), star, by_theory.redundancy, by_simulation.redundancy, found, reason)


def _simulated(one: Choice) -> float:
    return math.inf if one.simulated is None else one.simulated.found["ttt_norm"].mean


def _recommended(choices: Sequence[Choice], best: Choice, star: int, by_theory: int) -> tuple[int, str]:
    """The smallest redundancy that is as good as the best: it holds the least data and loses the fewest stacks."""
    margin = max(_ALIKE * _simulated(best), best.simulated.found["ttt_norm"].half_width or 0.0)
    alike = [one for one in choices if _simulated(one) <= _simulated(best) + margin]
    found = min(alike, key=lambda one: one.redundancy)
    said = f"simulated, it trains in {_simulated(found):.2f} times the time without failures"
    if found is not best:
        said += (
            f"; R = {best.redundancy} with {_simulated(best):.2f} is no better than chance has it (+- {margin:.2f}), "
            "and a smaller redundancy keeps less data on each group"
        )
    else:
        said += ", less than with any other redundancy"
    by_redundancy = {one.redundancy: one for one in choices}
    others = []
    for name, redundancy in (("the rule of thumb (8)", star), ("formula (7)", by_theory)):
        if redundancy != found.redundancy and redundancy in by_redundancy:
            others.append(f"R = {redundancy} of {name} comes to {_simulated(by_redundancy[redundancy]):.2f}")
    return found.redundancy, "; ".join([said, *others])
