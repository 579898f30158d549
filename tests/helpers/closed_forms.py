"""Closed forms of single effects, which the simulation behind ``ft plan buy`` has to reproduce, and those of SPARe.

In SPARe, N groups compute N shard types, r groups host each type, and k groups are lost so far. A number in parentheses
is that of the formula in SPARe's paper (sections 2.2 and 4).
"""

import argparse
import math
from pathlib import Path

import numpy as np
from scipy import special

from ft.lab.plan.goodput import scenario
from ft.systems.spare.controller.controller import engine, initial, state_of
from ft.systems.spare.placement import Placement


def asked(words: str) -> scenario.Scenario:
    """Return the scenario of a line of flags of ``ft plan buy``."""
    parser = argparse.ArgumentParser()
    scenario.add_flags(parser)
    return scenario.read(parser.parse_args(words.split()))


def deadpool(mttf_s: float, cost_s: float) -> float:
    """Return DEADPOOL's efficiency (section IV), MTTF / (MTTF + E[C]), with the cost of a failure in seconds."""
    return mttf_s / (mttf_s + cost_s)


def formula_1(shards: int, p: float, k: int) -> float:
    """Return DEADPOOL's bound (formula (1), section V-C) on the probability that a shard is lost: ``D p^(k+1)``.

    Nodes fail independently, each within a step with probability ``p``, and a shard is lost with its owner and its
    ``k`` holders.
    """
    return min(1.0, shards * p ** (k + 1))


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


def checkpoint_period(save: float, failure: float, restart: float) -> float:
    """Return SPARe's time between two checkpoints at which availability is highest (1).

    Args:
        save: T_s, duration of a checkpoint.
        failure: T_f, mean time between two global restarts.
        restart: T_r, duration of a global restart. All times have the same unit.
    """
    return save + math.sqrt(save**2 + 2 * save * (failure + restart))


def mu(groups: int, redundancy: int) -> float:
    """Return the mean number of failures of groups until a type has lost all of its hosts, a wipe-out (3)."""
    return math.gamma(1 + 1 / redundancy) * groups ** (1 - 1 / redundancy)


def stack_lower_bound(groups: int, redundancy: int) -> float:
    """Return the mean number of types per group and step up to the first wipe-out, without patch computes (6)."""
    mean = mu(groups, redundancy)
    return sum(-(-groups // (groups - k)) for k in range(math.floor(mean))) / mean


def trials(placement: Placement, number: int, seed: int, accelerate: bool | None = None) -> np.ndarray:
    """Let groups fail one after the other in random order up to the wipe-out, handled by SPARe's controller.

    Args:
        placement: the placement of shard types.
        number: number of trials.
        seed: seed of the orders in which groups fail; the first trials are the same for any number of trials.
        accelerate: whether to compile the controller with numba; None: if numba is installed. The results are the same.

    Returns:
        int64 [number, 3]: for each trial the failures, including the one that causes the wipe-out, the sum of S before
        each failure, and the number of patch computes.
    """
    chosen = engine(accelerate)
    made, first = state_of(placement, chosen), initial(placement, chosen)
    one, counts = chosen.numbers([0]), chosen.numbers([0, 0, 0])
    rng = np.random.default_rng(seed)
    found = np.empty((number, 3), dtype=np.int64)
    for i in range(number):
        chosen.trial(made, first, chosen.numbers(rng.permutation(placement.groups)), one, counts)
        found[i] = counts
    return found


def spare_tables() -> list[tuple]:
    """Return tables 4, 5 and 6 of SPARe: N, r, and as printed: failures by (3) and by trials, and stacks likewise."""
    text = Path(__file__).with_name("spare_tables.txt").read_text().splitlines()
    split = (line.split() for line in text if not line.startswith("#"))
    return [(int(groups), int(redundancy), *rest) for groups, redundancy, *rest in split]
