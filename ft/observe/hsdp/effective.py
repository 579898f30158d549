"""Effective training time: the share of the time that training at full strength without a stop would have needed.

The paper's formula (section 6.1): of 18 minutes between failures a replica is away for 10, of which all stand still for
3; with 12 replicas (8 + 7 * 11/12) / 18 = 80 %. Where all wait for the repair it is (18 - 10) / 18 = 44 %.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ft.observe.hsdp.lineage import Step
from ft.observe.hsdp.stalls import FAILURE, REJOIN, Incident, Pace

PAPER_BETWEEN_S, PAPER_REPAIR_S, PAPER_STALL_S, PAPER_REPLICAS = 1080.0, 600.0, 180.0, 12


def asynchronous(between_s: float, repair_s: float, stall_s: float, replicas: float, lost: float = 1) -> float:
    """Effective training time where the others go on, by the paper's formula in its general form.

    Args:
        between_s: from one failure to the next. repair_s: until the lost replicas contribute again. stall_s: of this,
            and of their return, in which all stand still. lost: replicas in one failure.
    """
    stall = min(stall_s, between_s)
    away = min(max(repair_s, stall), between_s)
    return (between_s - away + (away - stall) * (replicas - lost) / replicas) / between_s


def synchronous(between_s: float, repair_s: float) -> float:
    """Effective training time where all wait until the lost replica is repaired."""
    return (between_s - min(repair_s, between_s)) / between_s


@dataclass(frozen=True)
class Effective:
    """Effective training time of a run.

    Attributes:
        measured: normal step time x share of replicas that contributed, summed over the steps, of the time that these
            took. wall_s: this time. failures: in it. between_s: ``wall_s`` for each failure, None without any.
            stall_s: mean for each failure, its rejoin included. repair_s: mean until the replica contributed again.
        formula: the paper's, with these. paper_rate: the same with a failure every 18 minutes. None without a failure
            that was repaired. waiting: the formula where all wait, at that rate, with this ``repair_s``.
    """

    measured: float | None
    wall_s: float = 0.0
    failures: int = 0
    between_s: float | None = None
    stall_s: float | None = None
    repair_s: float | None = None
    formula: float | None = None
    paper_rate: float | None = None
    waiting: float | None = None


def effective(steps: Sequence[Step], pace: Pace, incidents: Sequence[Incident], replicas: int) -> Effective:
    """The effective training time of the surviving ``steps``, of which ``pace`` says how long they took."""
    wall = sum(pace.took)
    if not steps or wall <= 0:
        return Effective(None)
    useful = sum(
        normal * len(step.commit.streams) / step.commit.deal.replicas
        for step, normal in zip(steps, pace.normal, strict=True)
    )
    failures = [one for one in incidents if one.kind == FAILURE and one.replicas]
    away = [away_s for one in incidents if one.kind == REJOIN for away_s in one.away_s]
    measured = min(1.0, useful / wall)
    if not failures:
        return Effective(measured, wall)
    stall = sum(one.stall_s for one in incidents if one.kind in (FAILURE, REJOIN)) / len(failures)
    between, lost = wall / len(failures), statistics.mean(len(one.replicas) for one in failures)
    if not away:
        return Effective(measured, wall, len(failures), between, stall)
    repair = statistics.mean(away)
    return Effective(
        *(measured, wall, len(failures), between, stall, repair),
        formula=asynchronous(between, repair, stall, replicas, lost),
        paper_rate=asynchronous(PAPER_BETWEEN_S, repair, stall, replicas, lost),
        waiting=synchronous(PAPER_BETWEEN_S, repair),
    )
