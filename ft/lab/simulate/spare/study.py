"""Run every case of a scenario over its seeds."""

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
    """An estimated mean.

    Attributes:
        mean: mean of the values.
        half_width: half the width of its 95 % confidence interval (Student's t); None with a single value, or an
            infinite mean.
    """

    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Row:
    """Results of one case.

    Attributes:
        scheme: one of ``SCHEMES``.
        redundancy: redundancy of SPARe, or degree of replication.
        period_s: seconds between checkpoints; None without failures.
        results: one per seed.
        found: estimates, by the names of :data:`MEASURES`. For a run that was given up, ``ttt_norm`` is extrapolated
            from the steps it kept, and infinite if it kept none.
        given_up: number of runs that were given up.
        progress: fraction of the steps that was kept, mean over the seeds.
    """

    scheme: str
    redundancy: int
    period_s: float | None
    results: tuple[Result, ...]
    found: dict[str, Estimate]
    given_up: int
    progress: float


def study(asked: Scenario) -> Iterator[Row]:
    """Yield the results of every case of a scenario, each as soon as it is available.

    Raises:
        UserError: a redundancy cannot be placed, or the trace cannot be read.
    """
    law = asked.failures()
    for scheme, redundancy in cases(asked):
        yield row(asked, law, scheme, redundancy)


def cases(asked: Scenario) -> list[tuple[str, int]]:
    """Return (scheme, redundancy) of every case of a scenario.

    Raises:
        UserError: a redundancy of SPARe cannot be placed.
    """
    usual = (theory.r_star(asked.job.groups),)
    by_scheme = {"spare": asked.redundancy or usual, "replication": asked.degree or usual, "checkpoint": (1,)}
    found = [(scheme, redundancy) for scheme in asked.schemes for redundancy in by_scheme[scheme]]
    for scheme, redundancy in found:
        if scheme == "spare":
            ruler(asked.job.groups, redundancy)
    return found


def row(asked: Scenario, law: Law, scheme: str, redundancy: int) -> Row:
    """Run one case over its seeds."""
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
    """Return the scheme in its initial state.

    Raises:
        UserError: SPARe cannot place that redundancy.
    """
    if scheme == "spare":
        return Spare(Placement(groups, ruler(groups, redundancy)))
    return Replication(groups, redundancy)


def endurance(groups: int, scheme: str, redundancy: int) -> float:
    """Return the expected number of failures up to a global restart.

    It is SPARe, formula (3) for SPARe, that of the blocks for replication, and 1 for checkpoints alone.
    """
    return theory.mu(groups, redundancy) if scheme == "spare" else replication_endurance(groups, redundancy)


def checkpoint_period(asked: Scenario, scheme: str, redundancy: int) -> float:
    """Return the checkpoint period in seconds by SPARe, formula (1); infinite without failures.

    T_f is the scheme's endurance times ``mtbf_s``.
    """
    if math.isinf(asked.mtbf_s):
        return math.inf
    interval = endurance(asked.job.groups, scheme, redundancy) * asked.mtbf_s
    return theory.checkpoint_period(asked.job.save_s, interval, asked.job.restart_s)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values and its confidence; infinite values make the mean infinite."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2 or not math.isfinite(mean):
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, float(special.stdtrit(count - 1, 0.975)) * math.sqrt(variance / count))


def _pace(result: Result, steps: int, base_s: float) -> float:
    return result.total_s * steps / (result.steps * base_s) if result.steps else math.inf
