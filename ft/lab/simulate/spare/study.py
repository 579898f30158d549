"""A scenario's cases, each over its seeds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy import special

from ft.lab.simulate.spare.clocks import Law
from ft.lab.simulate.spare.run import Result, run
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.schemes import Replication, Scheme, Spare, replication_endurance
from ft.systems.spare import theory
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

MEASURES = ("ttt_norm", "up_fraction", "availability", "restarts", "stacks_per_step")


@dataclass(frozen=True)
class Estimate:
    """Of a mean. ``half_width``: of its 95 % confidence interval (Student's t), None with a single value."""

    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        scheme, redundancy: the case. period_s: of its checkpoints, None without failures. results: by seed.
        found: by the names of :data:`MEASURES`. Where a run was given up, ``ttt_norm`` is what it would have taken at
            the rate of its steps, infinite if it kept none.
        given_up: number of such runs. progress: share of the steps that was kept, mean.
    """

    scheme: str
    redundancy: int
    period_s: float | None
    results: tuple[Result, ...]
    found: dict[str, Estimate]
    given_up: int
    progress: float


def study(asked: Scenario) -> Iterator[Row]:
    """Every case of a scenario, each as soon as it is there.

    Raises:
        UserError: a redundancy cannot be placed, or the trace cannot be read.
    """
    law = asked.failures()
    for scheme, redundancy in cases(asked):
        yield row(asked, law, scheme, redundancy)


def cases(asked: Scenario) -> list[tuple[str, int]]:
    """(scheme, redundancy) of a scenario, those of SPARe checked: UserError where one cannot be placed."""
    usual = (theory.r_star(asked.job.groups),)
    by_scheme = {"spare": asked.redundancy or usual, "replication": asked.degree or usual, "checkpoint": (1,)}
    found = [(scheme, redundancy) for scheme in asked.schemes for redundancy in by_scheme[scheme]]
    for scheme, redundancy in found:
        if scheme == "spare":
            ruler(asked.job.groups, redundancy)
    return found


def row(asked: Scenario, law: Law, scheme: str, redundancy: int) -> Row:
    """One case over its seeds."""
    job, seeds = asked.job, range(asked.seed, asked.seed + asked.seeds)
    period = checkpoint_period(asked, scheme, redundancy)
    crew = build(job.groups, scheme, redundancy)
    results = []
    for seed in seeds:
        crew.reset()
        results.append(run(job, crew, law, period, seed))
    pace = [_pace(result, job.steps, job.base_s) for result in results]
    values = {name: [getattr(result, name) for result in results] for name in MEASURES[1:]}
    found = {name: estimate(each) for name, each in {"ttt_norm": pace, **values}.items()}
    given_up = sum(result.steps < job.steps for result in results)
    progress = sum(result.steps for result in results) / (job.steps * len(results))
    finite = None if math.isinf(period) else period
    return Row(scheme, redundancy, finite, tuple(results), found, given_up, progress)


def build(groups: int, scheme: str, redundancy: int) -> Scheme:
    """Raises UserError where SPARe cannot place that redundancy."""
    if scheme == "spare":
        return Spare(Placement(groups, ruler(groups, redundancy)))
    return Replication(groups, redundancy)


def endurance(groups: int, scheme: str, redundancy: int) -> float:
    """Expected failures up to a global restart: (3) for SPARe, of its blocks for replication, 1 without either."""
    return theory.mu(groups, redundancy) if scheme == "spare" else replication_endurance(groups, redundancy)


def checkpoint_period(asked: Scenario, scheme: str, redundancy: int) -> float:
    """(1) in seconds, with T_f the scheme's endurance times ``mtbf_s``; infinite without failures."""
    if math.isinf(asked.mtbf_s):
        return math.inf
    interval = endurance(asked.job.groups, scheme, redundancy) * asked.mtbf_s
    return theory.checkpoint_period(asked.job.save_s, interval, asked.job.restart_s)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and confidence of independent values; infinite values make an infinite mean."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2 or not math.isfinite(mean):
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, float(special.stdtrit(count - 1, 0.975)) * math.sqrt(variance / count))


def _pace(result: Result, steps: int, base_s: float) -> float:
    return result.total_s * steps / (result.steps * base_s) if result.steps else math.inf
