"""Simulate every case of a scenario of the SPARe simulation with several seeds, and estimate the means.

A case is a fault-tolerance scheme (SPARe, replication or checkpoints alone) with a redundancy, the number of
data-parallel groups that hold each data shard.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy import special

from ft.lab.simulate.spare import theory
from ft.lab.simulate.spare.clocks import Law
from ft.lab.simulate.spare.run import Result, run
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.schemes import Replication, Scheme, Spare, replication_endurance
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import ruler

MEASURES = ("ttt_norm", "up_fraction", "availability", "restarts", "stacks_per_step")
"""Estimated quantities: the time to train relative to that without failures, jitter and redundancy, and
properties of :class:`ft.lab.simulate.spare.run.Result`.
"""


@dataclass(frozen=True)
class Estimate:
    """An estimated mean.

    Attributes:
        mean: mean of the values.
        half_width: half the width of the mean's 95 % confidence interval (Student's t); None with a single value, or
            an infinite mean.
    """

    mean: float
    half_width: float | None


@dataclass(frozen=True)
class Row:
    """Results of one case.

    Attributes:
        scheme: "spare", "replication" or "checkpoint".
        redundancy: redundancy of SPARe, or degree of replication.
        period_s: seconds between checkpoints; None without failures.
        results: totals of the runs, one per seed.
        found: name from :data:`MEASURES` -> estimate. For a run that was given up, ``ttt_norm`` is extrapolated from
            the steps that the run has completed, and infinite if there are none.
        given_up: number of runs that were given up.
        progress: fraction of the job's steps that the runs have completed, mean over the seeds.
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
        UserError: SPARe has no placement with a redundancy, or the trace of failures cannot be read.
    """
    law = asked.failures()
    for scheme, redundancy in cases(asked):
        yield row(asked, law, scheme, redundancy)


def cases(asked: Scenario) -> list[tuple[str, int]]:
    """Return (scheme, redundancy) of every case of a scenario.

    Raises:
        UserError: SPARe has no placement of data shards with a redundancy.
    """
    usual = (theory.r_star(asked.job.groups),)
    by_scheme = {"spare": asked.redundancy or usual, "replication": asked.degree or usual, "checkpoint": (1,)}
    found = [(scheme, redundancy) for scheme in asked.schemes for redundancy in by_scheme[scheme]]
    for scheme, redundancy in found:
        if scheme == "spare":
            ruler(asked.job.groups, redundancy)
    return found


def row(asked: Scenario, law: Law, scheme: str, redundancy: int) -> Row:
    """Simulate one case with all seeds of the scenario."""
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
        UserError: SPARe has no placement of data shards with this redundancy.
    """
    if scheme == "spare":
        return Spare(Placement(groups, ruler(groups, redundancy)))
    return Replication(groups, redundancy)


def endurance(groups: int, scheme: str, redundancy: int) -> float:
    """Return the expected number of group failures until a global restart, which ends with the last of them.

    For SPARe it is computed by SPARe, formula (3); for replication it is exact; for checkpoints alone it is 1.
    """
    return theory.mu(groups, redundancy) if scheme == "spare" else replication_endurance(groups, redundancy)


def checkpoint_period(asked: Scenario, scheme: str, redundancy: int) -> float:
    """Return the checkpoint period in seconds by SPARe, formula (1); infinite without failures.

    The mean time to a global restart in the formula (T_f) is the scheme's :func:`endurance` times ``mtbf_s``.
    """
    if math.isinf(asked.mtbf_s):
        return math.inf
    interval = endurance(asked.job.groups, scheme, redundancy) * asked.mtbf_s
    return theory.checkpoint_period(asked.job.save_s, interval, asked.job.restart_s)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with its confidence interval; an infinite value makes the mean infinite."""
    count, mean = len(values), math.fsum(values) / len(values)
    if count < 2 or not math.isfinite(mean):
        return Estimate(mean, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, float(special.stdtrit(count - 1, 0.975)) * math.sqrt(variance / count))


def _pace(result: Result, steps: int, base_s: float) -> float:
    """Return the normalized time to train of a run, extrapolated if the run was given up."""
    return result.total_s * steps / (result.steps * base_s) if result.steps else math.inf
