"""Pipeline stages that were rebuilt from their neighbours (CheckFree), and what that did to the loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.record.run import Run, number
from ft.show.text import count, seconds

_LEVEL_STEPS = 5
"""Batches differ: the loss before a rebuild is the mean over so many steps."""

HEAD = ("step", "stage", "made from", "seconds", "loss before", "after", "jump", "made good")


@dataclass(frozen=True)
class Rebuild:
    """One stage, once.

    Attributes:
        step: the committed step it was rebuilt at. stage, strategy, weights, seconds: as in the event.
        before: mean loss of the last steps up to that one. after: loss of the step that followed; None where unknown.
        good_after: steps until the loss was back at ``before``, None while it is not.
    """

    step: int
    stage: int
    strategy: str
    weights: list[float]
    seconds: float
    before: float | None
    after: float | None
    good_after: int | None

    @property
    def jump(self) -> float | None:
        """How much the loss has risen."""
        return None if self.before is None or self.after is None else self.after - self.before


def rebuilds(run: Run) -> list[Rebuild]:
    """In order; of a rebuild that was begun again at the same step, the last time."""
    losses = {m["step"]: loss for m in run.metrics if (loss := number(m, "loss")) is not None}
    found: dict[tuple[int, int], Rebuild] = {}
    for event in run.events:
        if event.name == events.STAGE_REBUILT and event.step is not None:
            made = _rebuild(event, losses)
            found[made.step, made.stage] = made
    return list(found.values())


def rows(found: Sequence[Rebuild]) -> list[tuple[str, ...]]:
    """A line for each, under ``HEAD``."""
    return [
        (
            str(r.step),
            str(r.stage),
            _made_from(r),
            seconds(r.seconds),
            _loss(r.before),
            _loss(r.after),
            "-" if r.jump is None else f"{r.jump:+.3f}",
            "not yet" if r.good_after is None else f"after {count(r.good_after, 'step')}",
        )
        for r in found
    ]


def _rebuild(event: Event, losses: Mapping[int, float]) -> Rebuild:
    detail: Mapping[str, Any] = event.detail
    step = event.step
    last = [losses[s] for s in range(step - _LEVEL_STEPS + 1, step + 1) if s in losses]
    before = mean(last) if last else None
    good = None
    if before is not None:
        later = (s for s in sorted(losses) if s > step and losses[s] <= before)
        good = next((s - step for s in later), None)
    weights = [float(weight) for weight in detail.get("weights", ())]
    return Rebuild(
        step,
        int(detail.get("stage", -1)),
        str(detail.get("strategy", "")),
        weights,
        float(detail.get("seconds", 0.0)),
        before,
        losses.get(step + 1),
        good,
    )


def _made_from(made: Rebuild) -> str:
    shares = " + ".join(f"{100 * weight:.0f} %" for weight in made.weights)
    return f"{made.strategy} ({shares})" if any(made.weights) else made.strategy


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
