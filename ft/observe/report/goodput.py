"""Compute goodput: the share of a run's wall time that was spent on committed steps.

A step is committed when every rank has finished its optimizer update. Steps that are rolled back and computed again
count only once. An epoch is a version of the map from logical ranks to workers; training begins when the first epoch
opens.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ft.base import events
from ft.base.events import Event, elapsed
from ft.record.recoveries import Recovery
from ft.record.run import number


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
        history: events in order of time.
        found: the recoveries in ``history``.
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
