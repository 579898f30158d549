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
from ft.show.text import count, seconds

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
HEAD = ("step", "where", "operator", "phase", "layer", "microbatch", "compared", "elements", "then")


@dataclass(frozen=True)
class Corruption:
    """What redundant execution (DMR) did in a run.

    Attributes:
        strategy: how operators were verified; None where no event names it.
        covered: set of the verification plan -> number of operators in it in the first iteration, summed over ranks,
            the largest set first.
        mismatches: operators whose two executions differed, or tensors that arrived different from what was sent, in
            order of time.
        rows: for each mismatch, the cells of a table with the columns ``HEAD``.
        evicted: logical ranks whose node was evicted, in order.
        clean: number of steps that completed correctly after a mismatch.
        falls: (step, share of the operators that was verified before, the smaller share from then on).
    """

    strategy: str | None
    covered: Mapping[str, int]
    ranks: int
    mismatches: Sequence[Event]
    rows: Sequence[tuple[str, ...]]
    redone: int
    evicted: tuple[int, ...]
    gave_up: bool
    clean: int
    falls: tuple[tuple[int, float, float], ...] = ()

    @property
    def steps(self) -> list[int]:
        """Return the steps with at least one mismatch, sorted."""
        return sorted({event.step for event in self.mismatches if event.step is not None})


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
        mismatches=by_name[events.DMR_MISMATCH],
        rows=[_row(event, follows.get(_attempt(event), "-")) for event in by_name[events.DMR_MISMATCH]],
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
    what += [f"{count(found.clean, 'step')} correct in the end"] if found.clean else []
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


def _row(event: Event, follows: str) -> tuple[str, ...]:
    """Return the cells of a mismatch; ``follows``: what DMR did after that attempt, such as "step redone"."""
    detail = event.detail

    def said(key: str) -> str:
        return "-" if detail.get(key) in (None, "") else str(detail[key])

    rank = "-" if event.rank is None else f"rank {event.rank}"
    where = ", ".join((rank, *(str(place) for name in ("host", "device") if (place := detail.get(name)))))
    attempt, elements, of = detail.get("attempt"), detail.get("elements"), detail.get("of")
    step = f"{event.step}, attempt {attempt}" if isinstance(attempt, int) and attempt > 1 else str(event.step)
    # Where only digests were compared, nobody knows how many elements differ.
    differ = "some" if elements is None else str(elements) if of is None else f"{elements} of {of}"
    layer = str(detail.get("layer") or "outside")  # layer 0: embedding, loss, optimizer
    return (step, where, said("operator"), said("phase"), layer, said("microbatch"), said("how"), differ, follows)


ACTION_HEAD = ("step", "protection", "what it did")


def action_rows(run: Run) -> list[tuple[str, ...]]:
    """Return the rows of a table of the actions of protections, with the columns ``ACTION_HEAD``, by step.

    All ranks take an action together; one that several of them report is listed once.
    """
    acted = [event for event in run.events if event.name == events.PROTECTION_ACTED]
    found = [(str(e.step), str(e.detail["protection"]), str(e.detail["what"])) for e in sorted(acted, key=_step)]
    return list(dict.fromkeys(found))


def _step(event: Event) -> int:
    return event.step or 0


_LEVEL_STEPS = 5
"""Number of steps over which the loss before a rebuild is averaged, because the loss varies from batch to batch."""

REBUILD_HEAD = ("step", "stage", "made from", "seconds", "loss before", "after", "jump", "made good")


def rebuild_rows(run: Run) -> list[tuple[str, ...]]:
    """Return a row with the columns of ``REBUILD_HEAD`` for each pipeline stage that was rebuilt from its neighbours.

    The loss before is the mean of the last steps, the one after that of the next step; a rebuild is made good when the
    loss is again at or below the former. Of several rebuilds of a stage at the same step only the last one counts.
    """
    losses = {m["step"]: loss for m in run.metrics if (loss := number(m, "loss")) is not None}
    rebuilt = (event for event in run.events if event.name == events.STAGE_REBUILT and event.step is not None)
    latest = {(event.step, event.detail.get("stage")): event for event in rebuilt}
    return [_rebuild_row(event, losses) for event in latest.values()]


def _rebuild_row(event: Event, losses: Mapping[int, float]) -> tuple[str, ...]:
    detail, step = event.detail, event.step or 0
    last = [losses[s] for s in range(step - _LEVEL_STEPS + 1, step + 1) if s in losses]
    before, after = mean(last) if last else None, losses.get(step + 1)
    later = (s for s in sorted(losses) if before is not None and s > step and losses[s] <= before)
    good = next((f"after {count(s - step, 'step')}" for s in later), "not yet")
    shares = " + ".join(f"{100 * share:.0f} %" for share in detail.get("weights", ()))
    made_from = f"{detail.get('strategy', '')}" + (f" ({shares})" if any(detail.get("weights", ())) else "")
    jump = "-" if before is None or after is None else f"{after - before:+.3f}"
    took = seconds(float(detail.get("seconds", 0.0)))
    return (str(step), str(detail.get("stage", -1)), made_from, took, _loss(before), _loss(after), jump, good)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
