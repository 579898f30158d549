"""List what protections did during a run: actions of user-defined ones, and stages that CheckFree rebuilt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.record.run import Run, number
from ft.show.text import count, seconds

ACTION_HEAD = ("step", "protection", "what it did")
_LEVEL_STEPS = 5
"""Number of steps over which the loss before a rebuild is averaged, because the loss varies from batch to batch."""

REBUILD_HEAD = ("step", "stage", "made from", "seconds", "loss before", "after", "jump", "made good")


@dataclass(frozen=True)
class Action:
    """One action of a protection, which all ranks took together.

    Attributes:
        what: what the protection did, as text that begins with a verb.
    """

    step: int
    protection: str
    what: str


def actions(run: Run) -> list[Action]:
    """Return the actions of a run in the order of steps; an action that several ranks report is listed once."""
    found = (
        Action(event.step, str(event.detail["protection"]), str(event.detail["what"]))
        for event in run.events
        if event.name == events.PROTECTION_ACTED
    )
    return sorted(dict.fromkeys(found), key=lambda action: action.step)


def action_rows(found: list[Action]) -> list[tuple[str, ...]]:
    """Return the rows of a table of actions with the columns ``ACTION_HEAD``."""
    return [(str(action.step), action.protection, action.what) for action in found]


@dataclass(frozen=True)
class Rebuild:
    """One rebuild of one pipeline stage.

    Attributes:
        step: the committed step at which the stage was rebuilt.
        stage: number of the stage, from the event; -1 where the event lacks it.
        strategy: name of CheckFree's method with which the stage was rebuilt, from the event.
        weights: weights of the neighbouring stages in the average, from the event.
        seconds: duration of the rebuild, from the event.
        before: mean loss of the last steps up to ``step``; None where unknown.
        after: loss of the step that followed; None where unknown.
        good_after: number of steps until the loss was at or below ``before`` again; None while it is not.
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
        """Return by how much the loss has risen, or None where that is unknown."""
        return None if self.before is None or self.after is None else self.after - self.before


def rebuilds(run: Run) -> list[Rebuild]:
    """Return the rebuilds in order; of several rebuilds of a stage at the same step, only the last one."""
    losses = {m["step"]: loss for m in run.metrics if (loss := number(m, "loss")) is not None}
    found: dict[tuple[int, int], Rebuild] = {}
    for event in run.events:
        if event.name == events.STAGE_REBUILT and event.step is not None:
            made = _rebuild(event, losses)
            found[made.step, made.stage] = made
    return list(found.values())


def rebuild_rows(found: Sequence[Rebuild]) -> list[tuple[str, ...]]:
    """Return one table row for each rebuild, with the columns of ``REBUILD_HEAD``."""
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
