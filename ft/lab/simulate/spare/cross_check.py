"""Validate the step-level simulation of SPARe against SimGrid, a discrete-event simulator of distributed systems.

Both simulate the same small scenarios with the same failures, and without random variation of durations (jitter). A
case is a fault-tolerance scheme (SPARe, replication or checkpoints alone) with a redundancy.
"""

import importlib.util
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from ft.base.errors import UserError
from ft.lab.simulate.spare.clocks import Law, Trace
from ft.lab.simulate.spare.run import Job, RunTotals, run
from ft.lab.simulate.spare.scenario import Scenario
from ft.lab.simulate.spare.simgrid_model import simulate
from ft.lab.simulate.spare.study import build, cases, checkpoint_period

TOLERANCE = 1e-4
"""Greatest relative difference of the total times that counts as rounding."""
_MOST = 200_000
"""Greatest number of groups times steps that SimGrid simulates in reasonable time."""


@dataclass(frozen=True)
class Comparison:
    """One case of one seed, simulated both ways.

    Attributes:
        groups: number of data-parallel groups.
        scheme: name of the scheme.
        redundancy: redundancy of SPARe, or degree of replication.
        seed: seed of the failures.
        step_level: totals of the step-level simulation.
        simgrid: totals of the SimGrid simulation.
    """

    groups: int
    scheme: str
    redundancy: int
    seed: int
    step_level: RunTotals
    simgrid: RunTotals

    @property
    def difference(self) -> float:
        """Return the relative difference of the total times."""
        return self.simgrid.total_s / self.step_level.total_s - 1.0

    @property
    def agrees(self) -> bool:
        """Return whether all counts are equal, and the total times differ by no more than rounding."""
        counts = [{**asdict(seen), "total_s": 0.0} for seen in (self.step_level, self.simgrid)]
        return counts[0] == counts[1] and abs(self.difference) <= TOLERANCE


def installed() -> bool:
    """Return whether SimGrid is installed."""
    return importlib.util.find_spec("simgrid") is not None


def check(asked: Scenario) -> None:
    """Check that the scenario can be simulated with SimGrid.

    Raises:
        UserError: SimGrid is not installed, or the scenario is too large for it.
    """
    if not installed():
        raise UserError(
            "SimGrid is not installed",
            "pip install '.[simgrid]' builds it (15 minutes); some systems have it as a package python3-simgrid",
        )
    if asked.job.groups * asked.job.steps > _MOST:
        raise UserError(
            f"{asked.job.groups} groups and {asked.job.steps} steps: SimGrid would take hours",
            f"a cross-check is for small scenarios: groups times steps at most {_MOST:,}",
        )


def compare(asked: Scenario) -> list[Comparison]:
    """Simulate every case of the scenario with every seed both ways, without jitter.

    Raises:
        UserError: SimGrid is not installed, the scenario is too large for it, or SPARe has no placement with a
            redundancy.
    """
    check(asked)
    job = replace(asked.job, jitter=0.0)
    found = []
    for seed in range(asked.seed, asked.seed + asked.seeds):
        law = recorded(asked, seed)
        for scheme, redundancy in cases(asked):
            period = checkpoint_period(asked, scheme, redundancy)
            result = run(job, build(job.groups, scheme, redundancy), law, period, seed)
            step_level = RunTotals(**{field.name: getattr(result, field.name) for field in fields(RunTotals)})
            # SimGrid allows only one engine per process.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                simgrid = pool.submit(_by_simgrid, job, scheme, redundancy, law, period).result()
            found.append(Comparison(job.groups, scheme, redundancy, seed, step_level, simgrid))
    return found


def recorded(asked: Scenario, seed: int) -> Law:
    """Return the failures for both simulations: a trace, drawn from the scenario's distribution up to the longest
    duration of a run.
    """
    law = asked.failures()
    if isinstance(law, Trace) or math.isinf(asked.mtbf_s):
        return law
    rng, failures = np.random.default_rng(seed), []
    groups, due = np.arange(asked.job.groups), np.zeros(asked.job.groups)
    end = (asked.job.limit + 1.0) * asked.job.base_s
    while len(groups):
        due = law.after(due, groups, rng)
        groups, due = groups[due < end], due[due < end]
        failures.extend(zip(due.tolist(), groups.tolist(), strict=True))
    return Trace(failures)


def _by_simgrid(job: Job, scheme: str, redundancy: int, law: Law, period_s: float) -> RunTotals:
    return simulate(job, build(job.groups, scheme, redundancy), law, period_s)
