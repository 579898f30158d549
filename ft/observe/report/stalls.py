"""Measure how many seconds failures and rejoins of replicas cost the other replicas of an FT-HSDP run.

The stall of a step is its duration in excess of the median duration of undisturbed steps around it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ft.base import events
from ft.base.events import Event
from ft.observe.report.lineage import Step

FAILURE, REJOIN, RESTART = "failure", "rejoin", "full restart"
_AROUND = 20
_ANOTHER_SERVER = 1000


@dataclass(frozen=True)
class Pace:
    """Durations of the surviving steps in seconds.

    Attributes:
        took: the duration of each step.
        normal: for each step, the median duration of undisturbed steps around it.
    """

    took: list[float]
    normal: list[float]

    def stall(self, index: int) -> float:
        """Return the seconds by which the step at ``index`` exceeded its normal duration."""
        return max(0.0, self.took[index] - self.normal[index])


@dataclass(frozen=True)
class Incident:
    """A failure, a rejoin of replicas, or a full restart.

    Attributes:
        kind: FAILURE: replicas that contributed to the previous step no longer contribute, or the step was retried.
            REJOIN: replicas fetch the state, up to the first step to which they contribute. RESTART: all replicas
            continued from a checkpoint; the time since that checkpoint is part of the stall.
        replicas: the replicas that failed or rejoined; none where a step was only retried, all in a RESTART.
        first: number of the first step concerned.
        last: number of the last step concerned.
        begin: wall time at which the first step began.
        end: wall time at which the last step was committed.
        stall_s: total stall of the incident's steps in seconds.
        longest_s: duration of the longest of these steps in seconds.
        normal_s: median duration of undisturbed steps around the incident, in seconds.
        retries: number of quorums that committed no step.
        reason: the reason that the quorum server gives.
        away_s: for a REJOIN, the absence in seconds of each replica that contributed before: from the commit of its
            last step before the absence to the beginning of its first step after it.
    """

    kind: str
    replicas: tuple[int, ...]
    first: int
    last: int
    begin: float
    end: float
    stall_s: float
    longest_s: float
    normal_s: float
    retries: int = 0
    reason: str = ""
    away_s: tuple[float, ...] = ()


@dataclass
class _Span:
    """The steps and replicas of an incident whose cost is not computed yet.

    Attributes:
        first: index of its first step.
        last: index of its last step.
        away_s: the absence of each rejoined replica in seconds.
    """

    first: int
    last: int
    replicas: set[int] = field(default_factory=set)
    away_s: list[float] = field(default_factory=list)


def find(steps: Sequence[Step], server: Sequence[Event]) -> tuple[Pace, list[Incident]]:
    """Return the durations of the surviving steps, and the incidents in order.

    Args:
        steps: the surviving steps (committed steps that are part of the current training state), in order.
        server: events of the quorum server, in order of time.
    """
    retries = _retries(steps)
    restarts = [
        _Span(index, index, set(step.commit.members)) for index, step in enumerate(steps) if index and _is_loaded(step)
    ]
    begun = {span.first for span in restarts}
    failures = [span for span in _failures(steps, retries) if span.first not in begun]
    rejoins = _rejoins(steps, begun)
    disturbed = {0} | {index for span in (*failures, *rejoins, *restarts) for index in range(span.first, span.last + 1)}
    took = _durations(steps)
    pace = Pace(took, _normal(took, disturbed))
    failed = {span.first for span in failures}
    found = [_incident(RESTART, span, [span.first], steps, pace) for span in restarts]
    found += [
        _incident(FAILURE, span, [span.first], steps, pace, retries.get(span.first, 0), _reason(span, steps, server))
        for span in failures
    ]
    for span in rejoins:
        own = [index for index in range(span.first, span.last + 1) if index not in failed]
        found.append(_incident(REJOIN, span, own, steps, pace))
    return pace, sorted(found, key=lambda one: (one.first, one.kind))


def replica_of(event: Event) -> int | None:
    """Return the replica that an event of the quorum server concerns, or None."""
    number = event.detail.get("replica")
    return number if isinstance(number, int) and number >= 0 else None


def _is_loaded(step: Step) -> bool:
    """Return whether the step started from a loaded checkpoint: such a state names no quorum of the previous step."""
    return step.commit.before == 0 and step.number > 1


def _durations(steps: Sequence[Step]) -> list[float]:
    """Return the seconds between consecutive commits; for the first step, the duration that it recorded itself.

    Each difference is taken on the clocks of the replicas that committed both steps (the median over these replicas).
    """
    found = [max(0.0, steps[0].commit.step_s)] if steps else []
    for last, step in pairwise(steps):
        own = [step.by[r].wall - last.by[r].wall for r in step.by.keys() & last.by.keys()]
        took = statistics.median(own) if own else step.when - last.when
        # If steps in between are missing from the record, use the duration that the step recorded itself.
        is_next = last.number == step.number - 1
        found.append(max(0.0, took if is_next else step.commit.step_s))
    return found


def _normal(took: Sequence[float], disturbed: set[int]) -> list[float]:
    """Return for each step the median duration of undisturbed steps near it."""
    calm = [index for index in range(len(took)) if index not in disturbed] or list(range(len(took)))
    found, at = [], 0
    for index in range(len(took)):
        while at < len(calm) and calm[at] < index:
            at += 1
        near = calm[max(0, at - _AROUND) : at + _AROUND]
        found.append(statistics.median(took[i] for i in near))
    return found


def _retries(steps: Sequence[Step]) -> dict[int, int]:
    """Return index of a step -> number of failed quorums before the quorum that committed the step.

    A quorum server numbers its quorums consecutively. A server that takes over begins with a much larger number, and
    such a jump is not counted.
    """
    gaps = {
        index: step.commit.quorum - step.commit.before - 1 for index, step in enumerate(steps) if step.commit.before
    }
    return {index: gap for index, gap in gaps.items() if 0 < gap < _ANOTHER_SERVER}


def _failures(steps: Sequence[Step], retries: Mapping[int, int]) -> list[_Span]:
    found = []
    for index, (last, step) in enumerate(pairwise(steps), 1):
        lost = set(last.commit.healthy) - set(step.commit.healthy)
        # If the run was continued with a smaller number of replicas, the missing replicas have not failed.
        lost &= set(range(step.commit.assignment.replicas))
        if lost or index in retries:
            found.append(_Span(index, index, lost))
    return ([_Span(0, 0)] if 0 in retries else []) + found


def _rejoins(steps: Sequence[Step], begun: set[int]) -> list[_Span]:
    """Return the spans from the step in which a replica begins to fetch the state to the first step it contributes to.

    Overlapping spans are merged. ``begun`` contains the indices of steps that all replicas began together (restarts).
    """
    spans: list[_Span] = []
    since: dict[int, int] = {}  # replica -> index of the step in which it began to fetch
    seen: dict[int, int] = {}  # replica -> index of the last step to which it contributed
    for index, step in enumerate(steps):
        commit = step.commit
        if index in begun:
            since, seen = {}, dict.fromkeys(range(commit.assignment.replicas), index)
            continue
        for replica in set(since) - set(commit.members):  # the replica left again
            del since[replica]
        for replica in commit.behind:
            since.setdefault(replica, index)
        for replica in commit.healthy:
            came_at_once = index > 0 and seen.get(replica, -1) < index - 1 and replica not in since
            if replica in since or came_at_once:
                away = _away(steps, seen.get(replica), index)
                spans.append(_Span(since.pop(replica, index), index, {replica}, away))
            seen[replica] = index
    spans += [_Span(first, len(steps) - 1, {replica}) for replica, first in since.items()]
    return _joined(sorted(spans, key=lambda span: span.first))


def _away(steps: Sequence[Step], last: int | None, index: int) -> list[float]:
    """Return the absence of a replica in seconds: from the commit of step ``last`` to the beginning of step ``index``.

    Both are indices into ``steps``. The list has one value, or none if the replica had contributed to no step before.
    """
    return [] if last is None else [max(0.0, steps[index - 1].when - steps[last].when)]


def _joined(spans: Sequence[_Span]) -> list[_Span]:
    found: list[_Span] = []
    for span in spans:
        if found and span.first <= found[-1].last:
            found[-1].last = max(found[-1].last, span.last)
            found[-1].replicas |= span.replicas
            found[-1].away_s += span.away_s
        else:
            found.append(span)
    return found


def _incident(
    kind: str, span: _Span, own: Sequence[int], steps: Sequence[Step], pace: Pace, retries: int = 0, reason: str = ""
) -> Incident:
    """Build an incident; its stall is that of the steps with the indices ``own``."""
    return Incident(
        kind=kind,
        replicas=tuple(sorted(span.replicas)),
        first=steps[span.first].number,
        last=steps[span.last].number,
        begin=steps[span.first].when - pace.took[span.first],
        end=steps[span.last].when,
        stall_s=sum(pace.stall(index) for index in own),
        longest_s=max((pace.took[index] for index in own), default=0.0),
        normal_s=pace.normal[span.first],
        retries=retries,
        reason=reason,
        away_s=tuple(span.away_s),
    )


def _reason(span: _Span, steps: Sequence[Step], server: Sequence[Event]) -> str:
    """Return why the quorum server took the replicas of the span offline, or else why it formed another quorum."""
    begin = steps[span.first - 1].when if span.first else 0.0
    during = [event for event in server if begin - 1.0 <= event.wall <= steps[span.first].when]
    said = [
        f"replica {replica_of(event)}: {event.detail.get('reason')}"
        for event in during
        if event.name == events.REPLICA_OFFLINE and replica_of(event) in span.replicas
    ]
    formed = [
        str(event.detail.get("reason"))
        for event in during
        if event.name == events.QUORUM_FORMED and event.step == steps[span.first].number - 1
    ]
    return "; ".join(dict.fromkeys(said)) or (formed[-1] if formed else "")
