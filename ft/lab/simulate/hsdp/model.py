"""Effective training time in closed form: as the paper of FT-HSDP has it, and with failures that overlap.

Effective training time is what is trained, in parts of what all replicas would have trained in the same time without
a failure: an hour with 11 of 12 replicas counts 11/12 of an hour, an hour in which everybody waits counts nothing.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What one failure does. All times in seconds.

    Attributes:
        key: short, for programs and colours. name: for people.
        replicas: 1: everybody is restarted by every failure (synchronous recovery).
        interval_s: mean time between two failures anywhere. step_s: of a training step.
        stall_s: from a failure until the replicas left have regained what they had, the redone step included.
        rebuild_s: from a failure until its replica asks to be let in again.
        rejoin_s: how long everybody waits when it is.
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
    """The paper's own arithmetic (section 6.1): one failure every interval, over before the next one comes.

    (18 - 10) / 18 = 44 % for synchronous recovery, (8 + 7 x 11/12) / 18 = 80 % for FT-HSDP. 0 where the interval is too
    short for it.
    """
    rest = 1.0 - 1.0 / case.replicas
    full = case.interval_s - case.rebuild_s - case.rejoin_s
    fewer = max(0.0, case.rebuild_s - case.stall_s)
    return max(0.0, full + fewer * rest) / case.interval_s


def overlapping(case: Case) -> float:
    """The expected effective training time if failures are independent of one another (Poisson) and may overlap.

    A failure strikes any replica alike. One that is being rebuilt begins again; a stall that is under way is prolonged.
    Steps have no length here: a rebuilt replica is let in at once, during a stall too. Every replica is a Poisson
    stream of its own, so this is exact: the chance that a replica has been in for ``rejoin_s`` or longer, times the
    chance for each of the others that it makes nobody wait.
    """
    rate = case.interval_s**-1 / case.replicas
    stall, rebuild, rejoin = min(case.stall_s, case.rebuild_s), case.rebuild_s, min(case.rejoin_s, case.rebuild_s)
    is_in = math.exp(-rate * rebuild)
    settled = math.exp(-rate * (rebuild + rejoin))
    long_out = 1.0 - is_in - rate * is_in * stall
    if rejoin > stall:
        # Those who came back within rejoin_s and were out again before stall_s ago make the others wait all the same.
        more = rejoin - stall
        long_out -= is_in * (rate * more - 1.0 + math.exp(-rate * more))
    return settled * (settled + long_out) ** (case.replicas - 1)
