"""Compute everything that the report on an FT-HSDP run shows, once, from the files of the run.

In FT-HSDP several replicas (full copies of the model, each with its own workers) train together. Surviving steps are
the committed steps that are part of the current training state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ft.observe.hsdp.audit import Audit, audit
from ft.observe.hsdp.effective import Effective, effective
from ft.observe.hsdp.lanes import OFFLINE, ONLINE, REBUILDING, Lane, lanes, origin
from ft.observe.hsdp.lineage import Lineage, Step, lineage
from ft.observe.hsdp.record import Record
from ft.observe.hsdp.stalls import Incident, Pace, find
from ft.record.run import number


@dataclass(frozen=True)
class Losses:
    """The loss after each surviving step whose loss is known.

    Attributes:
        points: (amount, loss) after each step.
        over: what the amount counts: "tokens" or "samples".
        at: step -> amount of tokens or samples trained up to the end of that step.
    """

    points: list[tuple[float, float]]
    over: str
    at: dict[int, float]


@dataclass(frozen=True)
class Story:
    """A run's record and everything that the report computes from it.

    Attributes:
        record: the run's files as read.
        lineage: the surviving steps, and the superseded ones.
        audit: whether every sample was trained exactly once.
        pace: durations of the surviving steps.
        incidents: failures and rejoins of replicas, and full restarts.
        lanes: when each replica was in which state.
        effective: effective training time.
        losses: the loss after each surviving step.
        zero: wall time at which the report's relative times start.
    """

    record: Record
    lineage: Lineage
    audit: Audit
    pace: Pace
    incidents: list[Incident]
    lanes: list[Lane]
    effective: Effective
    losses: Losses
    zero: float

    @property
    def steps(self) -> list[Step]:
        return self.lineage.steps

    def of_kind(self, kind: str) -> list[Incident]:
        """Return the incidents of one kind (FAILURE, REJOIN or RESTART)."""
        return [one for one in self.incidents if one.kind == kind]

    def seconds_in(self, replica: int, state: str) -> float:
        """Return the total seconds that the replica was in ``state``."""
        return sum(lane.end - lane.begin for lane in self.lanes if (lane.replica, lane.state) == (replica, state))

    def times_offline(self, replica: int) -> int:
        """Return how often the replica stopped contributing."""
        own = [lane for lane in self.lanes if lane.replica == replica]
        return sum(a.state == ONLINE and b.state in (OFFLINE, REBUILDING) for a, b in pairwise(own))


def tell(record: Record) -> Story:
    """Return the story of a run, computed from its record."""
    found = lineage({number: one.commits for number, one in record.replicas.items()})
    pace, incidents = find(found.steps, record.events)
    return Story(
        record=record,
        lineage=found,
        audit=audit(found),
        pace=pace,
        incidents=incidents,
        lanes=lanes(record, found.steps, pace.took),
        effective=effective(found.steps, pace, incidents, record.count),
        losses=_losses(record, found.steps),
        zero=origin(record, found.steps),
    )


def _losses(record: Record, steps: Sequence[Step]) -> Losses:
    """Return the losses from the commit logs or, where a commit has none, from the metrics of a replica in the step.

    The amount counts tokens where the tokens of all steps are known, else samples.
    """
    metrics = {replica: {m["step"]: m for m in one.metrics} for replica, one in record.replicas.items()}
    length = _tokens_per_sample(metrics)
    knows = all(step.commit.tokens is not None for step in steps) or length is not None
    points, at, amount = [], {}, 0.0
    for step in steps:
        samples = step.commit.batch * len(step.commit.streams)
        tokens = step.commit.tokens if step.commit.tokens is not None else samples * (length or 0.0)
        amount += tokens if knows else samples
        at[step.number] = amount
        values = (metrics.get(replica, {}).get(step.number, {}) for replica in sorted(step.by))
        known = [value for each in values if (value := number(each, "loss")) is not None]
        loss = step.loss if step.loss is not None else next(iter(known), None)
        if loss is not None:
            points.append((amount, loss))
    return Losses(points, "tokens" if knows else "samples", at)


def _tokens_per_sample(metrics) -> float | None:
    """Return the tokens per sample, computed from a step's tokens per second, seconds and samples, or None."""
    for steps in metrics.values():
        for each in steps.values():
            figures = [number(each, name) for name in ("tokens_per_s", "step_time_s", "global_batch_size")]
            if all(figures):
                return float(round(figures[0] * figures[1] / figures[2]))
    return None
