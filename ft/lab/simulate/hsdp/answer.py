"""Every case by every means, and sweeps over the number of replicas and the time between two failures."""

from dataclasses import dataclass, replace

from ft.lab.simulate.hsdp.cases import Job, Stalls, cases
from ft.lab.simulate.hsdp.history import EXPONENTIAL, FAMILIES, Failures, Outcome, Rules, simulate
from ft.lab.simulate.hsdp.model import Case, by_formula, overlapping

REPLICAS = (2, 4, 6, 8, 12, 16, 24, 32, 48)
INTERVALS_MIN = (4.5, 9.0, 18.0, 36.0, 72.0, 144.0)


@dataclass(frozen=True)
class Means:
    """How long and how exactly to simulate. ``days``: of virtual time in each history."""

    rules: Rules
    days: float
    seed: int
    shape: float


@dataclass(frozen=True)
class Found:
    """One case. ``simulated``: by family of failures."""

    case: Case
    formula: float
    overlapping: float
    simulated: dict[str, Outcome]


@dataclass(frozen=True)
class Answer:
    """``by_replicas`` and ``by_interval``: number of replicas, or minutes -> case -> effective training time, simulated
    with failures that are independent of one another."""

    found: list[Found]
    by_replicas: dict[int, dict[str, float]]
    by_interval: dict[float, dict[str, float]]


def answer(job: Job, ours: Stalls, means: Means, sweep: bool = True) -> Answer:
    """Works it all out; about 10 s on one core for 365 days."""
    found = [_all_means(case, means) for case in cases(job, ours)]
    by_replicas, by_interval = {}, {}
    if sweep:
        counts = sorted({*REPLICAS, job.replicas})
        by_replicas = {count: _sweep(replace(job, replicas=count), ours, means) for count in counts}
        minutes = sorted({*INTERVALS_MIN, job.interval_s / 60})
        by_interval = {minute: _sweep(replace(job, interval_s=60 * minute), ours, means) for minute in minutes}
    return Answer(found, by_replicas, by_interval)


def _all_means(case: Case, means: Means) -> Found:
    outcomes = {family: _simulated(case, means, family) for family in FAMILIES}
    return Found(case, by_formula(case), overlapping(case), outcomes)


def _sweep(job: Job, ours: Stalls, means: Means) -> dict[str, float]:
    shorter = replace(means, days=means.days / 4)
    return {case.key: _simulated(case, shorter, EXPONENTIAL).effective for case in cases(job, ours)}


def _simulated(case: Case, means: Means, family: str) -> Outcome:
    # What synchronous recovery loses between two checkpoints the paper's figures leave out: ft plan disruption has it.
    rules = Rules(1, 0) if case.replicas == 1 else means.rules
    return simulate(case, Failures(family, means.shape), rules, means.days * 86400.0, means.seed)


def lost_gpu_hours(job: Job, effective: float) -> float:
    """Per day."""
    return 24.0 * job.gpus * (1.0 - effective)
