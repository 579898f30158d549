"""Closed forms of single effects, and their comparison with the simulation (``ft plan check-model``)."""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scipy import special

from ft.lab.plan.goodput import engine, model, scenario
from ft.lab.plan.goodput.model import CHECKPOINTS, Protection
from ft.lab.plan.spare.theory import mu
from ft.protection.table import HOT_SWAP, REPLICAS, STACKS
from ft.show.text import percent, table

TOLERANCE = 0.005


def daly(compute_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the useful share of the time of a run with checkpoints (Daly 2006, exact for exponential failures).

    Failures strike also during saves, restarts and replay.

    Args:
        compute_s: seconds of computing between two checkpoints.
        save_s, restart_s: durations of a checkpoint and of a restart.
        mtbf_s: mean time between two failures of the run.
    """
    cycle = math.exp(restart_s / mtbf_s) * math.expm1((compute_s + save_s) / mtbf_s)
    return compute_s / (mtbf_s * cycle)


def young(save_s: float, mtbf_s: float) -> float:
    """Return Young's estimate of the best seconds of computing between two checkpoints, sqrt(2 C M)."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def waiting(nodes: int, standbys: int, node_mtbf_s: float, repair_s: float) -> float:
    """Return the share of the time in which fewer nodes than needed are whole; all nodes fail and are repaired alike.

    In the stationary birth-and-death chain each node is away independently. The law of the repairs does not matter.
    """
    away = repair_s / (repair_s + node_mtbf_s)
    return float(special.bdtrc(standbys, nodes + standbys, away))


def deadpool(mttf_s: float, cost_s: float) -> float:
    """Return DEADPOOL's efficiency (section IV), MTTF / (MTTF + E[C]), with the cost of a failure in seconds."""
    return mttf_s / (mttf_s + cost_s)


def ft_hsdp(between_s: float, replicas: int, stall_s: float, rebuild_s: float) -> float:
    """Return the effective training time by FT-HSDP, section 6.1: one failure per interval, whose effects then end.

    Args:
        between_s: time between two failures anywhere.
        replicas: number of replicas; 1: all restart.
        stall_s: time for which all replicas wait.
        rebuild_s: time until the failed replica is back.
    """
    fewer = max(0.0, rebuild_s - stall_s) * (1.0 - 1.0 / replicas)
    return max(0.0, between_s - rebuild_s + fewer) / between_s


def overlapping(between_s: float, replicas: int, stall_s: float, rebuild_s: float) -> float:
    """Return the effective training time of replicas with independent failures, which may overlap.

    A failure of a replica under rebuild begins its rebuild anew; steps have no length, and a rebuilt replica joins at
    once. The failures of each replica are a Poisson process, so the result is exact: the probability that a replica
    trains, times that of each other replica to cause no stall. Arguments as of :func:`ft_hsdp`.
    """
    rate, stall = 1.0 / (between_s * replicas), min(stall_s, rebuild_s)
    trains = math.exp(-rate * rebuild_s)
    return trains * (1.0 - trains * rate * stall) ** (replicas - 1)


def endurance(groups: int, degree: int) -> float:
    """Return the mean number of random failures until a block of replication loses its last group, that one included.

    The groups are in blocks of ``degree``, the last of which may be smaller. With failure times uniform in 0..1, a
    block of b groups survives until p with probability 1 - p^b, and each number of failures has the same weight.
    """
    full, rest = divmod(groups, degree)
    found = special.beta(1 / degree, full + 1)
    if rest:
        found -= special.beta((rest + 1) / degree, full + 1)
    return float((groups + 1) * found / degree)


@dataclass(frozen=True)
class Case:
    """A comparison: the closed form's name and value, and a function that simulates the same quantity.

    ``scale`` is 1 for shares; for other quantities the difference is relative to it.
    """

    name: str
    exact: float
    simulated: Callable[[int], float]
    scale: float = 1.0


def asked(words: str) -> scenario.Scenario:
    """Return the scenario of a line of flags."""
    parser = argparse.ArgumentParser()
    scenario.add_flags(parser)
    return scenario.read(parser.parse_args(words.split()))


def cases() -> Iterator[Case]:
    """Yield the comparisons, each of one effect on a small cluster."""
    base = "--gpus 64 --step-time 1s --days 30"
    alone, pair = Protection((CHECKPOINTS,)), Protection((HOT_SWAP,), copies=1)
    for hours, steps in ((320, 1000), (32, 500), (8, 300)):
        words = f"{base} --gpu-mtbf {hours}h --save-time 60s --restart-time 600s --repair-time 0"
        exact = daly(steps, 60.0, 600.0, hours * 3600 / 64)
        yield Case(f"Daly: a failure every {hours * 60 / 64:g} min", exact, _share(words, alone, 0, steps))
    for standbys in (0, 2, 5):
        words = f"{base} --gpu-mtbf 320h --save-time 0 --restart-time 0 --repair-time 8h"
        share = _share(words, alone, standbys, 1, "waited")
        exact = waiting(8, standbys, 40 * 3600.0, 8 * 3600.0)
        yield Case(f"birth and death: 8 nodes wait with {standbys} standbys", exact, share)
    for hours in (40, 160):
        between = hours * 3600 / 64
        words = f"{base} --gpu-mtbf {hours}h --step-time 10ms --save-time 60s --restart-time 600s --repair-time 0"
        exact = overlapping(between, 8, 180.0, 600.0)
        name = f"FT-HSDP, overlapping: 8 replicas, {between / 60:g} min"
        yield Case(name, exact, _share(words, Protection((REPLICAS,), 8), 0, 1e12))
    words = (
        "--gpus 96 --gpu-mtbf 28.8h --law periodic --step-time 10ms --save-time 0 --restart-time 10m --repair-time 0"
    )
    yield Case("FT-HSDP, 6.1: all restart", ft_hsdp(1080, 1, 600, 600), _share(words, alone, 0, 1))
    twelve = _share(words, Protection((REPLICAS,), 12), 0, 1e12)
    yield Case("FT-HSDP, 6.1: 12 replicas", ft_hsdp(1080, 12, 180, 600), twelve)
    words = f"{base} --gpu-mtbf 320h --save-time 60s --restart-time 600s --repair-time 0 --swap-time 30s"
    exact = deadpool(18000.0, 30.5 + 60.0 * 18000 / 100_000)
    yield Case("DEADPOOL, IV: hot-swap", exact, _share(words, pair, 8, 100_000))
    for redundancy in (2, 4):
        words = "--gpus 1600 --gpu-mtbf 100d --step-time 1s --save-time 0 --restart-time 0 --repair-time 0"
        spare, exact = Protection((REPLICAS, STACKS), 200, 0, redundancy, returns=False), mu(200, redundancy)
        yield Case(f"SPARe (3), failures endured: 200 groups, r = {redundancy}", exact, _endured(words, spare), exact)


def _share(words: str, protection: Protection, standbys: int, interval: float, part: str = ""):
    def simulated(failures: int) -> float:
        row = model.simulate(asked(words), protection, standbys, interval, failures)
        return row.totals[part] / row.totals["seconds"] if part else row.effective

    return simulated


def _endured(words: str, protection: Protection):
    def simulated(failures: int) -> float:
        totals = model.simulate(asked(words), protection, 0, 1, failures).totals
        return totals["units lost"] / totals["losses"]

    return simulated


def run(given: argparse.Namespace) -> int:
    """Print the comparisons; return 1 if one of them is out of its tolerance."""
    failures = 40_000 if engine.player()[0] == "numba" else 8000
    found = [(case, case.simulated(failures)) for case in cases()]
    if given.json:
        print(json.dumps([{"case": case.name, "exact": case.exact, "simulated": value} for case, value in found]))
    else:
        rows = [(case.name, *_shown(case, value)) for case, value in found]
        print(table(("closed form", "exact", "simulated", "difference"), rows, right=(1, 2, 3)))
    return int(any(not fits(case, value) for case, value in found))


def fits(case: Case, simulated: float) -> bool:
    """Return whether a simulated value agrees with the exact one."""
    return abs(simulated - case.exact) <= (TOLERANCE if case.scale == 1.0 else 0.06 * case.scale)


def _shown(case: Case, value: float) -> tuple[str, str, str]:
    if case.scale != 1.0:
        return f"{case.exact:.1f}", f"{value:.1f}", f"{100 * (value / case.exact - 1):+.1f} %"
    return percent(case.exact), percent(value), f"{100 * (value - case.exact):+.2f} points"
