"""Find the redundancy with which SPARe trains fastest: by the rule of thumb (8), by formula (7), and by simulation.

In SPARe each part (shard type) of a step's data is hosted by r groups of ranks; r is the redundancy. The formulas are
those of the SPARe paper. The recommendation may be no redundancy at all (checkpoints alone).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ft.lab.simulate.spare import theory
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.study import Row, checkpoint_period, endurance
from ft.systems.spare.placement import steps_between

_ALIKE = 0.01
"""Largest relative difference at which two times to train count as equal."""
WITHOUT = 1
"""Redundancy that stands for checkpoints alone: one host for each type, and every failure ends in a global restart."""


@dataclass(frozen=True)
class Choice:
    """One redundancy and what it costs.

    Attributes:
        redundancy: number of hosts of each shard type, or :data:`WITHOUT`.
        ttt_norm: time to train relative to a run without failures, by SPARe, formula (7).
        availability: share of the time (0 to 1) that advances the training, by SPARe, formula (2).
        period_s: seconds between checkpoints, by SPARe, formula (1).
        interval: the same as a number of steps, with the mean number of stacks in a step.
        simulated: result of the simulation; None where nothing was simulated.
    """

    redundancy: int
    ttt_norm: float
    availability: float
    period_s: float
    interval: int
    simulated: Row | None


@dataclass(frozen=True)
class Optimum:
    """The comparison and the recommendation.

    Attributes:
        choices: the redundancies that were compared.
        without: the choice without redundancy (checkpoints alone).
        r_star: redundancy by the rule of thumb, SPARe, formula (8).
        argmin_theory: redundancy among ``choices`` with the least time by the formulas.
        argmin_simulated: redundancy among ``choices`` with the least simulated time; None where nothing was simulated,
            or where no simulated run makes progress.
        recommended: the recommended redundancy, or :data:`WITHOUT`.
        reason: why this redundancy is recommended.
    """

    choices: tuple[Choice, ...]
    without: Choice
    r_star: int
    argmin_theory: int
    argmin_simulated: int | None
    recommended: int
    reason: str

    @property
    def period_s(self) -> float:
        """Return the seconds between checkpoints with the recommended redundancy."""
        return self._recommended.period_s

    @property
    def interval(self) -> int:
        """Return the steps between checkpoints with the recommended redundancy."""
        return self._recommended.interval

    @property
    def _recommended(self) -> Choice:
        every = (self.without, *self.choices)
        return next(choice for choice in every if choice.redundancy == self.recommended)


def choice(asked: Scenario, redundancy: int, simulated: Row | None) -> Choice:
    """Return what the formulas predict for a redundancy, or for checkpoints alone, together with the simulation's
    result.
    """
    job, scheme = asked.job, "checkpoint" if redundancy == WITHOUT else "spare"
    period = checkpoint_period(asked, scheme, redundancy)
    interval = endurance(job.groups, scheme, redundancy) * asked.mtbf_s
    share = theory.availability(period, job.save_s, interval, job.restart_s)
    stacks = 1.0 if redundancy == WITHOUT else theory.stack_mean(job.groups, redundancy)
    computed = stacks if simulated is None else simulated.found["stacks_per_step"].mean
    steps = steps_between(period, job.save_s, computed * job.stack_s + job.all_reduce_s)
    return Choice(redundancy, stacks / share, share, period, steps, simulated)


def optimum(asked: Scenario, choices: Sequence[Choice], without: Choice) -> Optimum:
    """Choose among ``choices`` (at least one) and checkpoints alone (``without``)."""
    star = theory.r_star(asked.job.groups)
    by_theory = min(choices, key=lambda one: one.ttt_norm)
    by_simulation = min(choices, key=_simulated)
    if math.isfinite(_simulated(by_simulation)):
        least = by_simulation.redundancy
        found, reason = _recommended(choices, by_simulation, star, by_theory.redundancy)
    else:
        none = None if by_simulation.simulated is None else "no simulated run with redundancy makes progress"
        least = None
        found, reason = by_theory.redundancy, f"{none or 'nothing was simulated'}; formula (7) is least there"
    said = _better_without(by_theory, by_simulation, without)
    if said is not None:
        found, reason = WITHOUT, said
    elif least is not None:
        reason += f"; checkpoints alone come to {_times(_simulated(without))}"
    return Optimum(tuple(choices), without, star, by_theory.redundancy, least, found, reason)


def _better_without(by_theory: Choice, by_simulation: Choice, without: Choice) -> str | None:
    """Return why checkpoints alone are as good as the best redundancy, or None if they are not."""
    simulated = without.simulated is not None
    alone = _simulated(without) if simulated else without.ttt_norm
    best = by_simulation if simulated else by_theory
    other = _simulated(best) if simulated else best.ttt_norm
    if not math.isfinite(alone) or alone > other * (1 + _ALIKE):
        return None
    means = "simulated" if simulated else "by the formulas"
    return (
        f"{means}, checkpoints alone train in {alone:.2f} times the time without failures, and the best redundancy, "
        f"R = {best.redundancy}, in {_times(other)}: no redundancy is worth its additional computation"
    )


def _times(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "no end"


def _simulated(one: Choice) -> float:
    return math.inf if one.simulated is None else one.simulated.found["ttt_norm"].mean


def _recommended(choices: Sequence[Choice], best: Choice, star: int, by_theory: int) -> tuple[int, str]:
    """Return the smallest redundancy that is as good as the best one, and the reason.

    With a smaller redundancy each group hosts fewer shard types, and computes fewer of them in a step.
    """
    alike = [one for one in choices if _simulated(one) <= _simulated(best) * (1 + _ALIKE)]
    found = min(alike, key=lambda one: one.redundancy)
    said = f"simulated, it trains in {_simulated(found):.2f} times the time without failures"
    by_redundancy, named = {one.redundancy: one for one in choices}, {found.redundancy}
    if found is best:
        said += ", less than with any other redundancy"
    else:
        named.add(best.redundancy)
        said += (
            f"; R = {best.redundancy} comes to {_simulated(best):.2f}, less than {100 * _ALIKE:g} % better, "
            "and the smaller redundancy keeps less data on each group"
        )
    others = []
    for name, redundancy in (("the rule of thumb (8)", star), ("formula (7)", by_theory)):
        if redundancy not in named and redundancy in by_redundancy:
            named.add(redundancy)
            others.append(f"R = {redundancy} of {name} comes to {_simulated(by_redundancy[redundancy]):.2f}")
    return found.redundancy, "; ".join([said, *others])
