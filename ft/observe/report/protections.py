"""What protections did during a run: mismatches of DMR, actions of user-defined ones, stages that CheckFree rebuilt.

The events are written by ``ft.systems.dmr.runtime.protection``. Malformed values in their details are tolerated.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.record.run import Run, number
from ft.show.text import count, seconds, table

WORDS = {
    "naive": "at once",
    "P": "with the recomputation",
    "D_inter": "in windows between units",
    "D_intra": "in windows inside units",
    "unchecked": "unchecked (not reproducible)",
    "opaque": "in whole functions",
}
"""Display names of the sets of operators in a verification plan (``ft.systems.dmr.plan.trace.SETS``).

A plan puts every operator into the set that says when the operator is executed a second time. A unit is the forward or
backward pass of one microbatch on one pipeline stage.
"""

BESIDE = {
    "in windows": "verified in their window",
    "early": "before it, because their memory was needed",
    "late": "after the last one",
    "unverified": "not compared",
    "not in the plan": "not found in the plan",
}
"""Display names of further counts (``ft.systems.dmr.runtime.engine.Engine.coverage``).

Operators in these counts are also counted in one of the sets. The counts say when a planned second execution really
happened.
"""

_RETRY, _EVICT, _GIVE_UP = "retry", "evict", "give up"
_MOST_LINES = 8
HEAD = ("step", "where", "operator", "phase", "layer", "microbatch", "compared", "elements", "then")


@dataclass(frozen=True)
class Mismatch:
    """One operator whose two executions differed, or one tensor that arrived different from what was sent.

    The properties format the fields of the event for tables.

    Attributes:
        follows: the action that DMR took after that attempt at the step, as text, such as "step redone".
    """

    event: Event
    follows: str

    @property
    def where(self) -> str:
        """Return the rank ("-" if unknown), with host and device where known: "rank 3, node07, cuda:1"."""
        rank = "-" if self.event.rank is None else f"rank {self.event.rank}"
        return ", ".join((rank, *(str(d) for name in ("host", "device") if (d := self.event.detail.get(name)))))

    @property
    def attempt(self) -> str:
        """Return the step, with the attempt if it was not the first one: "20" or "20, attempt 2"."""
        number, step = self.event.detail.get("attempt"), self.event.step
        return f"{step}, attempt {number}" if isinstance(number, int) and number > 1 else str(step)

    @property
    def elements(self) -> str:
        """Return how many elements differ, such as "3 of 4096", or "some" where only digests were compared."""
        elements, of = self.event.detail.get("elements"), self.event.detail.get("of")
        return "some" if elements is None else str(elements) if of is None else f"{elements} of {of}"

    @property
    def layer(self) -> str:
        """Return the layer number, or "outside" for layer 0 (embedding, loss, optimizer)."""
        return str(self.event.detail.get("layer") or "outside")

    def said(self, key: str) -> str:
        """Return the event's detail ``key`` as text, "-" where it is absent or empty."""
        value = self.event.detail.get(key)
        return "-" if value is None or value == "" else str(value)


@dataclass(frozen=True)
class Corruption:
    """What redundant execution (DMR) did in a run.

    Attributes:
        strategy: how operators were verified; None where no event names it.
        covered: set of the verification plan -> number of operators in it in the first iteration, summed over ranks,
            the largest set first.
        ranks: number of ranks that reported their coverage.
        mismatches: all mismatches in order of time.
        redone: number of attempts at steps that were repeated.
        evicted: logical ranks whose node was evicted, in order.
        gave_up: whether the run was ended because of corruption.
        clean: number of steps that completed correctly after a mismatch.
        falls: (step, share of the operators that was verified before, the smaller share from then on).
    """

    strategy: str | None
    covered: Mapping[str, int]
    ranks: int
    mismatches: Sequence[Mismatch]
    redone: int
    evicted: tuple[int, ...]
    gave_up: bool
    clean: int
    falls: tuple[tuple[int, float, float], ...] = ()

    @property
    def steps(self) -> list[int]:
        """Return the steps with at least one mismatch, sorted."""
        return sorted({one.event.step for one in self.mismatches if one.event.step is not None})


def corruption(history: Sequence[Event]) -> Corruption | None:
    """Return what DMR did in a run, or None if the run has no DMR events."""
    by_name = {name: [event for event in history if event.name == name] for name in _NAMES}
    if not any(by_name.values()):
        return None
    # A worker that takes over a rank reports the rank's coverage again; the last report counts.
    covered = {event.rank: event for event in by_name[events.DMR_COVERED]}
    verdicts = by_name[events.DMR_VERDICT]
    actions = Counter(str(event.detail.get("action")) for event in verdicts)
    evictions = [event for event in verdicts if event.detail.get("action") == _EVICT]
    follows = {_attempt(event): _answer(event) for event in verdicts}
    strategies = [event.detail.get("strategy") for event in covered.values() if event.detail.get("strategy")]
    return Corruption(
        strategy=str(strategies[-1]) if strategies else None,
        covered=_covered(covered.values()),
        ranks=len(covered),
        mismatches=[Mismatch(event, follows.get(_attempt(event), "-")) for event in by_name[events.DMR_MISMATCH]],
        redone=actions[_RETRY],
        evicted=tuple(rank for event in evictions for rank in _ranks(event)),
        gave_up=actions[_GIVE_UP] > 0,
        clean=len(by_name[events.DMR_CLEAN]),
        falls=tuple(_falls(by_name[events.DMR_COVERAGE_FELL])),
    )


_NAMES = (events.DMR_COVERED, events.DMR_COVERAGE_FELL, events.DMR_MISMATCH, events.DMR_VERDICT, events.DMR_CLEAN)


def _falls(found: Sequence[Event]) -> Iterator[tuple[int, float, float]]:
    for event in found:
        before, now = event.detail.get("before"), event.detail.get("now")
        if event.step is not None and isinstance(before, int | float) and isinstance(now, int | float):
            yield event.step, before, now


def _covered(covered: Any) -> dict[str, int]:
    """Sum operators over ranks by set, the largest set first; the overlapping counts of ``BESIDE`` come last."""
    total: Counter[str] = Counter()
    for event in covered:
        counts = event.detail.get("counts")
        for name, times in counts.items() if isinstance(counts, dict) else ():
            if isinstance(times, int) and times > 0:
                total[str(name)] += times
    return dict(sorted(total.items(), key=lambda one: (one[0] in BESIDE, -one[1])))


def _attempt(event: Event) -> tuple[Any, ...]:
    return event.step, event.epoch, str(event.detail.get("attempt"))


def _answer(event: Event) -> str:
    action = event.detail.get("action")
    if action == _EVICT:
        ranks = _ranks(event)
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} evicted"
    return {_RETRY: "step redone", _GIVE_UP: "run given up"}.get(str(action), str(action))


def _ranks(event: Event) -> list[int]:
    blamed = event.detail.get("blamed")
    return [rank for rank in blamed if isinstance(rank, int)] if isinstance(blamed, list) else []


def summary_of(found: Corruption) -> str:
    """Return one line such as "piggyback: 3 mismatches, 1 attempt redone; operators: 120 at once, ..."."""
    what = [count(len(found.mismatches), "mismatch").replace("mismatchs", "mismatches")]
    what += [f"{count(found.redone, 'attempt')} redone"] if found.redone else []
    if found.evicted:
        what.append(f"{'ranks' if len(found.evicted) > 1 else 'rank'} {', '.join(map(str, found.evicted))} evicted")
    what += ["given up"] if found.gave_up else []
    what += [fall_text(fall) for fall in found.falls]
    operators = f"; operators: {coverage(found)}" if found.covered else ""
    return f"{found.strategy or 'no coverage recorded'}: {', '.join(what)}{operators}"


def fall_text(fall: tuple[int, float, float]) -> str:
    """Return text such as "coverage fell from 100.00% to 98.00% in step 60"."""
    step, before, now = fall
    return f"coverage fell from {before:.2%} to {now:.2%} in step {step}"


def coverage(found: Corruption) -> str:
    """Return how many operators were verified when: "120 at once, 80 with the recomputation".

    A set of the verification plan without a display name is shown by its own name.
    """
    words = {**WORDS, **BESIDE}
    return ", ".join(f"{number} {words.get(name, name)}" for name, number in found.covered.items())


def text_table(found: Corruption) -> str:
    """Return a table of the first mismatches, or "" where there are none."""
    if not found.mismatches:
        return ""
    shown = found.mismatches[:_MOST_LINES]
    left = len(found.mismatches) - len(shown)
    lines = table(HEAD, [_row(one) for one in shown], right=(5,))
    return lines + (f"\nand {left} more, in report.html" if left else "")


def card(found: Sequence[Corruption]) -> tuple[str, str, str]:
    """Return the number of mismatches in all replicas for the head of the report, as (name, value, note)."""
    wrong, clean = sum(len(one.mismatches) for one in found), sum(one.clean for one in found)
    steps = count(sum(len(one.steps) for one in found), "step")
    note = f"in {steps}, {clean} of them clean in the end" if wrong else str(found[0].strategy or "")
    return "mismatches (DMR)", str(wrong), note


def rows(found: Corruption) -> list[Sequence[str]]:
    """Return a row with the columns of ``HEAD`` for each mismatch."""
    return [_row(one) for one in found.mismatches]


def _row(one: Mismatch) -> Sequence[str]:
    return (
        one.attempt,
        one.where,
        one.said("operator"),
        one.said("phase"),
        one.layer,
        one.said("microbatch"),
        one.said("how"),
        one.elements,
        one.follows,
    )


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
