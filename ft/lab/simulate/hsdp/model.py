"""Formulas for the effective training time of FT-HSDP: that of FT-HSDP, section 6.1, and one with overlapping failures.

The effective training time is the training done, as a fraction of the training that all replicas would have done in the
same time without failures. An hour with 11 of 12 replicas counts as 11/12 of an hour; an hour in which all replicas
wait counts as 0.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The frequency of failures and the costs of one failure. All times are in seconds.

    Attributes:
        key: short identifier, for JSON and colours.
        name: name shown to the user.
        replicas: number of replicas; 1: every failure restarts the whole job (synchronous recovery).
        interval_s: mean time between two failures anywhere.
        step_s: duration of a training step.
        stall_s: time from a failure until the remaining replicas have repeated the interrupted step.
        rebuild_s: time from a failure until the failed replica asks to rejoin.
        rejoin_s: time that all replicas wait when the failed replica rejoins.
    """

    key: str
    name: str
    replicas: int
    interval_s: float
    step_s: float
    stall_s: float
    rebuild_s: float
    rejoin_s: float = 0.0


def by_formula(case: Case) -> float:
    """Return the effective training time by the arithmetic of FT-HSDP, section 6.1.

    The formula assumes one failure per interval, whose effects are over before the next failure. With an interval of 18
    minutes it gives (18 - 10) / 18 = 44 % for synchronous recovery, and (8 + 7 x 11/12) / 18 = 80 % for FT-HSDP. The
    result is 0 where the interval is too short for that assumption.
    """
    rest = 1.0 - 1.0 / case.replicas
    full = case.interval_s - case.rebuild_s - case.rejoin_s
    fewer = max(0.0, case.rebuild_s - case.stall_s)
    return max(0.0, full + fewer * rest) / case.interval_s


def overlapping(case: Case) -> float:
    """Return the expected effective training time if failures are independent (Poisson) and may overlap.

    A failure strikes any replica with the same probability. If the replica is being rebuilt, the rebuild starts over; a
    stall in progress is prolonged. In this model steps have no length: a rebuilt replica joins at once, even during a
    stall. The failures of each replica are an independent Poisson process. Therefore the result is exact: the
    probability that a replica has been training for ``rejoin_s`` or longer, times the probability for each other
    replica that it causes no stall.
    """
    rate = case.interval_s**-1 / case.replicas
    stall, rebuild, rejoin = min(case.stall_s, case.rebuild_s), case.rebuild_s, min(case.rejoin_s, case.rebuild_s)
    is_in = math.exp(-rate * rebuild)
    settled = math.exp(-rate * (rebuild + rejoin))
    long_out = 1.0 - is_in - rate * is_in * stall
    if rejoin > stall:
        # A replica that rejoined within the last rejoin_s stalls the others, even if it failed again more than
        # stall_s ago.
        more = rejoin - stall
        long_out -= is_in * (rate * more - 1.0 + math.exp(-rate * more))
    return settled * (settled + long_out) ** (case.replicas - 1)
