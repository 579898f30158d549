"""Compute goodput, the share of a run's wall time that was spent on committed steps, and effective training time.

Steps that are rolled back and computed again count only once. Training begins when the first epoch opens.

Effective training time (FT-HSDP, section 6.1) is the share of the wall time that the same work would take without
failures. The example there: a failure happens every 18 minutes; a replica is then absent for 10 minutes, and during 3
of these 10 minutes all replicas stall. With 12 replicas the effective training time is (8 + 7 * 11/12) / 18 = 80 %. If
all replicas wait for the repair, it is (18 - 10) / 18 = 44 %.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ft.base import events
from ft.base.events import Event, elapsed
from ft.observe.report.lineage import FAILURE, REJOIN, Incident, Pace, Step
from ft.record.recoveries import Recovery
from ft.record.run import number

PAPER_BETWEEN_S, PAPER_REPAIR_S, PAPER_STALL_S, PAPER_REPLICAS = 1080.0, 600.0, 180.0, 12


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, in seconds.

    Attributes:
        wall: from the opening of the first epoch to the end of the run, or to its last event or step if it has not
            ended.
        startup: from the start of the run to the opening of the first epoch.
        productive: total time of the steps that were committed and not rolled back.
        recovering: total of ``lost``, the time spent on recoveries.
        other: the rest of ``wall``: repeated steps, evaluations, checkpoint saves, waiting.
        step: median time of a step, None before there is a step.
        steps: number of committed steps.
        lost: number of a recovery -> seconds from its fault to the next step.
    """

    wall: float
    startup: float
    productive: float
    recovering: float
    other: float
    step: float | None
    steps: int
    lost: dict[int, float] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """Return ``productive`` as a share of ``wall`` (0 to 1), None where nothing was measured."""
        return min(1.0, self.productive / self.wall) if self.wall > 0 and self.steps else None


def goodput(metrics: Sequence[dict[str, Any]], history: Sequence[Event], found: Sequence[Recovery]) -> Goodput:
    """Compute the goodput of a run.

    Args:
        metrics: one mapping per step, with ``step_time_s``.
    """
    times = [t for m in metrics if (t := number(m, "step_time_s")) is not None]
    productive = sum(times)
    wall, startup = _spans(history, productive)
    lost = {r.number: r.total for r in found if r.total is not None}
    recovering = sum(lost.values())
    return Goodput(
        wall=wall,
        startup=startup,
        productive=productive,
        recovering=recovering,
        other=max(0.0, wall - productive - recovering),
        step=statistics.median(times) if times else None,
        steps=len(metrics),
        lost=lost,
    )


def _spans(history: Sequence[Event], productive: float) -> tuple[float, float]:
    """Return (wall time of training, wall time before it) in seconds; without events, wall time is the steps' time."""
    if not history:
        return productive, 0.0
    begin = next((e for e in history if e.name == events.RUN_STARTED), history[0])
    opened = next((e for e in history if e.name == events.EPOCH_OPENED), begin)
    end = next((e for e in reversed(history) if e.name in (events.FINISHED, events.STOPPED)), history[-1])
    ended = end.name in (events.FINISHED, events.STOPPED)
    wall = elapsed(opened, end)
    # A run that has not ended writes no events during undisturbed training, so its steps may reach beyond the last
    # event.
    return (wall if ended else max(wall, productive)), elapsed(begin, opened)


def asynchronous(between_s: float, repair_s: float, stall_s: float, replicas: float, lost: float = 1) -> float:
    """Return the effective training time (0 to 1) if the other replicas continue during the repair.

    This generalises the formula of FT-HSDP, section 6.1, to several lost replicas.

    Args:
        between_s: seconds from one failure to the next.
        repair_s: seconds until the lost replicas contribute again.
        stall_s: seconds of the failure and the rejoin during which all replicas stall.
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
    stalls = [one.stall_s for one in incidents if one.kind in (FAILURE, REJOIN)]
    return _effective(useful, wall, [len(one.replicas) for one in failures], sum(stalls), away, replicas)


def effective_of_one(times: Goodput, found: Sequence[Recovery]) -> Effective:
    """Return the effective training time of a run with one replica, which waits for each of its recoveries."""
    if times.step is None or times.wall <= 0:
        return Effective(None)
    took = [r.total for r in found if r.total is not None]
    return _effective(times.steps * times.step, times.wall, [1] * len(found), sum(took), took, 1)


def _effective(
    useful: float, wall: float, lost: Sequence[int], stalled: float, away: Sequence[float], replicas: int
) -> Effective:
    """Return the effective training time of a run.

    Args:
        useful: seconds that the same work takes without failures.
        wall: seconds that it took.
        lost: number of replicas lost in each failure.
        stalled: seconds of the stalls of all failures and rejoins.
        away: seconds until a lost replica contributed again, for each that did.
    """
    measured, failures = min(1.0, useful / wall), len(lost)
    if not failures:
        return Effective(measured, wall)
    between, stall = wall / failures, stalled / failures
    if not away:
        return Effective(measured, wall, failures, between, stall)
    repair, at_once = statistics.mean(away), statistics.mean(lost)
    return Effective(
        *(measured, wall, failures, between, stall, repair),
        formula=asynchronous(between, repair, stall, replicas, at_once),
        paper_rate=asynchronous(PAPER_BETWEEN_S, repair, stall, replicas, at_once),
        waiting=synchronous(PAPER_BETWEEN_S, repair),
    )
