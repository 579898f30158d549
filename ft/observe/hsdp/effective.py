"""Compute effective training time: the share of a run's wall time that the same work would take without failures.

The metric is defined in FT-HSDP, section 6.1. Its example: a failure happens every 18 minutes; a replica (a full copy
of the model) is then absent for 10 minutes, and during 3 of these 10 minutes all replicas stall. With 12 replicas the
effective training time is (8 + 7 * 11/12) / 18 = 80 %. If all replicas wait for the repair, it is (18 - 10) / 18 =
44 %.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ft.observe.hsdp.lineage import Step
from ft.observe.hsdp.stalls import FAILURE, REJOIN, Incident, Pace

PAPER_BETWEEN_S, PAPER_REPAIR_S, PAPER_STALL_S, PAPER_REPLICAS = 1080.0, 600.0, 180.0, 12


def asynchronous(between_s: float, repair_s: float, stall_s: float, replicas: float, lost: float = 1) -> float:
    """Return the effective training time (0 to 1) if the other replicas continue during the repair.

    This generalises the formula of FT-HSDP, section 6.1, to several lost replicas.

    Args:
        between_s: seconds from one failure to the next.
        repair_s: seconds until the lost replicas contribute again.
        stall_s: seconds of the failure and the rejoin during which all replicas stall.
        replicas: number of replicas.
        lost: number of replicas lost in one failure.
    """
    stall = min(stall_s, between_s)
    away = min(max(repair_s, stall), between_s)
    return (between_s - away + (away - stall) * (replicas - lost) / replicas) / between_s


def synchronous(between_s: float, repair_s: float) -> float:
    """Return the effective training time (0 to 1) if all replicas wait until the lost one is repaired."""
    return (between_s - min(repair_s, between_s)) / between_s


@dataclass(frozen=True)
class Effective:
    """Effective training time of a run, as shares from 0 to 1.

    Attributes:
        measured: sum over the steps of (normal step time x share of replicas that contributed), divided by ``wall_s``.
        wall_s: total duration of the steps in seconds.
        failures: number of failures in that time.
        between_s: ``wall_s`` per failure, None without a failure.
        stall_s: mean stall per failure in seconds, its rejoin included.
        repair_s: mean seconds until a lost replica contributed again.
        formula: result of the formula of FT-HSDP, section 6.1, with these figures; None without a repaired failure.
        paper_rate: ``formula`` with a failure every 18 minutes, as in the paper; None without a repaired failure.
        waiting: effective training time if all replicas wait for each repair, with a failure every 18 minutes and this
            run's ``repair_s``.
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
    """Return the effective training time of a run.

    Args:
        steps: the surviving steps, that is, the committed steps that are part of the current training state.
        pace: durations of these steps.
        incidents: failures and rejoins of replicas.
        replicas: number of replicas of the run.
    """
    wall = sum(pace.took)
    if not steps or wall <= 0:
        return Effective(None)
    useful = sum(
        normal * len(step.commit.streams) / step.commit.assignment.replicas
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
