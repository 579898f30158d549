"""What the commit logs of an FT-HSDP run tell of its steps: the surviving ones, their audit, stalls and SPARe stacks.

The surviving steps are the committed steps that are part of the current training state. In a failure, some replicas may
commit a step while others do not. The others then commit this step again in a later quorum, and the former replicas
fetch the new state, or are lost. Therefore the lineage starts from the latest commit and follows the predecessor that
each commit names. Commits outside of this chain are superseded: their results are no longer in any replica's state.
After a restart from a checkpoint, the steps committed since that checkpoint are superseded.

The audit proves that every data sample was trained exactly once. It compares two sets. The samples trained are those
that the healthy replicas of each surviving step read: from the position that the replica's data loader recorded
(``at``) or, without such a record, from its position after the previous step. The samples consumed are those that lie
before the positions after the last step. Both are sets of indices in the run's global order of samples, so the number
of replicas may change during the run.

The stall of a step is its duration in excess of the median duration of undisturbed steps around it.

With SPARe, when a group is lost during a step, surviving groups compute those of its types that none of them has
computed, in the same step; this is a patch compute. A wipe-out is a step in which no host of some type was present, so
that other groups computed the type.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy

from ft.base import events
from ft.base.events import Event
from ft.show.text import count, percent, seconds
from ft.systems.hsdp.commits import Commit
from ft.systems.hsdp.samples import SampleAssignment, merged

_MOST_SENTENCES = 50
_SHARED = ("healthy", "behind", "batch", "assignment", "positions", "stack", "owners", "patch")

Key = tuple[int, int]
"""(quorum, step) of a commit; the greater key is the later commit."""


@dataclass(frozen=True)
class Step:
    """A committed step; ``by``: replica -> its line about the step in its commit log, for those that committed it."""

    by: Mapping[int, Commit]

    @cached_property
    def commit(self) -> Commit:
        """Return the line of a replica that contributed gradients to the step, or of any replica if there is none."""
        healthy = [number for number in sorted(self.by) if number in self.by[number].healthy]
        return self.by[healthy[0] if healthy else min(self.by)]

    @property
    def number(self) -> int:
        return self.commit.step

    @cached_property
    def when(self) -> float:
        """Return the wall time of the commit."""
        return statistics.median(commit.wall for commit in self.by.values())

    @cached_property
    def digests(self) -> dict[int, int]:
        """Return replica -> digest of its state after the step, for the replicas that computed one."""
        return {replica: commit.digest for replica, commit in self.by.items() if commit.digest is not None}


@dataclass(frozen=True)
class Lineage:
    """The steps of the surviving state, in order, and all other commits.

    Attributes:
        superseded: the committed steps that are not in the surviving state.
        missing: (first, last) numbers of steps that are in the state but in no replica's record.
        conflicts: sentences about replicas of one quorum whose lines about a step, or whose state digests, differ.
    """

    steps: list[Step] = field(default_factory=list)
    superseded: list[Step] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


def lineage(commits: Mapping[int, Sequence[Commit]]) -> Lineage:
    """Return the lineage of a run, given replica -> lines of its commit log."""
    by_key: dict[Key, dict[int, Commit]] = {}
    for replica, lines in sorted(commits.items()):
        for commit in lines:
            by_key.setdefault((commit.quorum, commit.step), {})[replica] = commit
    steps = {key: Step(by) for key, by in by_key.items()}
    chain, missing = _chain(steps)
    superseded = [step for key, step in sorted(steps.items()) if key not in chain]
    conflicts = [text for key in sorted(steps) for text in _conflicts(steps[key])]
    return Lineage([steps[key] for key in reversed(chain)], superseded, missing, conflicts[:_MOST_SENTENCES])


def _chain(steps: Mapping[Key, Step]) -> tuple[dict[Key, None], list[tuple[int, int]]]:
    """Return the keys of the chain back from the latest commit, and (first, last) of each range of missing steps."""
    chain: dict[Key, None] = {}
    missing = []
    by_number: dict[int, list[Key]] = {}
    for key in sorted(steps):
        by_number.setdefault(key[1], []).append(key)
    key = max(steps, default=None)
    while key is not None:
        chain[key] = None
        commit = steps[key].commit
        key = _parent(steps, by_number, commit)
        if key is not None and key[1] < commit.step - 1:
            missing.append((key[1] + 1, commit.step - 1))
    return chain, missing[::-1]


def _parent(steps: Mapping[Key, Step], by_number: Mapping[int, Sequence[Key]], commit: Commit) -> Key | None:
    """Return the key of the commit that precedes ``commit`` in the training state, or None if the record shows none.

    A state that was loaded from a persistent checkpoint does not name the quorum of its last step. In that case the
    parent is the latest commit whose sample positions equal those at which the run continues. If no replica has a
    record of the previous step, the parent is the last earlier commit that can have led to ``commit``.
    """
    named = (commit.before, commit.step - 1)
    if commit.before and named in steps:
        return named
    limit = commit.before or commit.quorum - 1
    for number in range(commit.step - 1, 0, -1):
        if commit.before and number == commit.step - 1:
            continue
        for key in reversed(by_number.get(number, ())):
            if key[0] <= limit and _can_lead(steps[key].commit, commit):
                return key
        if not commit.before:
            return None
    return None


def _can_lead(earlier: Commit, later: Commit) -> bool:
    """Return whether ``later`` can follow from ``earlier``, judged by the replicas' positions in the data.

    Both commits must have the same assignment (division of the samples among the replicas). If ``later`` started from a
    loaded checkpoint, the positions of ``earlier`` must equal the positions at which ``later`` starts; otherwise they
    must not exceed them.
    """
    before = before_of(later)
    assignment, positions = earlier.assignment.after(
        earlier.positions, earlier.step, later.assignment.replicas, later.assignment.block
    )
    if assignment != later.assignment:
        return False
    if not later.before:
        return all(position == before.get(replica, 0) for replica, position in positions.items())
    return all(position <= before.get(replica, 0) for replica, position in positions.items())


def before_of(commit: Commit) -> dict[int, int]:
    """Return replica -> position in the data before a commit, computed from its own line and in its own assignment."""
    before = dict(commit.positions)
    for replica in commit.streams:
        before[replica] = max(0, before.get(replica, 0) - commit.batch)
    return before


def _conflicts(step: Step) -> list[str]:
    first = step.commit
    found = []
    used = [commit.parameters for commit in step.by.values() if commit.parameters is not None]
    for replica, commit in step.by.items():
        names = [name for name in _SHARED if getattr(commit, name) != getattr(first, name)]
        if replica in commit.healthy and replica in first.members and commit.before != first.before:
            names.append("before")
        if replica in step.digests and step.digests[replica] != next(iter(step.digests.values())):
            names.append("state, bit for bit,")
        if commit.parameters is not None and commit.parameters != used[0]:
            names.append("model, bit for bit, that it computed the step with,")
        if names:
            found.append(
                f"step {first.step} of quorum {first.quorum}: replica {replica} has another {', '.join(names)}"
            )
    return found


FAILURE, REJOIN, RESTART = "failure", "rejoin", "full restart"
_AROUND = 20
_ANOTHER_SERVER = 1000


@dataclass(frozen=True)
class StepPace:
    """Durations of the surviving steps in seconds.

    Attributes:
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
        away_s: the absence of each rejoined replica in seconds.
    """

    first: int
    last: int
    replicas: set[int] = field(default_factory=set)
    away_s: list[float] = field(default_factory=list)


def find(steps: Sequence[Step], server: Sequence[Event]) -> tuple[StepPace, list[Incident]]:
    """Return the durations of the surviving steps, and the incidents in order.

    Args:
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
    pace = StepPace(took, _normal(took, disturbed))
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
    kind: str,
    span: _Span,
    own: Sequence[int],
    steps: Sequence[Step],
    pace: StepPace,
    retries: int = 0,
    reason: str = "",
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


_MOST_EXAMPLES = 5
_NOTHING = numpy.empty((0, 2), numpy.int64)


@dataclass(frozen=True)
class Audit:
    """The result of an audit, in numbers of samples.

    Attributes:
        trained: samples trained in the surviving steps on record.
        earlier: samples consumed before the first step on record.
        unproven: samples consumed in steps that are missing from the record.
        duplicates: repeated trainings of samples.
        gaps: samples that the state counts as consumed, but that were never trained (lost).
        unaccounted: samples that were trained, but that the state does not count as consumed yet.
        waiting: samples not consumed yet although samples after them in the global order are; the replicas that were
            absent will train them.
        examples: sentences that name duplicates, gaps and unaccounted samples.
    """

    trained: int
    replicas: Mapping[int, int]
    earlier: int = 0
    unproven: int = 0
    duplicates: int = 0
    gaps: int = 0
    unaccounted: int = 0
    waiting: int = 0
    problems: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Return whether each sample is proven to have been trained exactly once."""
        return not (self.duplicates or self.gaps or self.unaccounted or self.unproven or self.problems)


def audit(found: Lineage) -> Audit:
    """Return the result of auditing the surviving steps."""
    if not found.steps:
        return Audit(0, {})
    problems, replicas = list(found.conflicts), {}
    reads, unproven, earlier = _Reads(), [], _NOTHING
    last: Commit | None = None
    for step in found.steps:
        commit = step.commit
        assignment, before = commit.assignment, before_of(commit)
        if last is None:
            earlier = assignment.taken(before) if commit.step > 1 else _NOTHING
        elif last.step == commit.step - 1:
            problems += _contradictions(last, commit, before)
            before = _carried(last, commit)
        else:
            unproven.append(_minus(assignment.taken(before), last.assignment.taken(last.positions)))
        problems += _misread(step, before)
        surplus = [replica for replica in commit.streams if replica >= assignment.replicas]
        problems += [f"step {commit.step}: replica {replica} trained, but has no samples" for replica in surplus]
        for replica, stream, begin in _read(step, before):
            if stream not in surplus:
                reads.add(commit, stream, begin)
                replicas[replica] = replicas.get(replica, 0) + commit.batch
        last = commit
    taken = last.assignment.taken(last.positions)
    counted = numpy.concatenate([earlier, *unproven, *reads.ranges()])
    kinds = _compare(counted, taken)
    size = {name: int((ranges[:, 1] - ranges[:, 0]).sum()) for name, ranges in kinds.items()}
    return Audit(
        trained=sum(replicas.values()),
        replicas=replicas,
        earlier=_length(earlier),
        unproven=sum(map(_length, unproven)),
        **size,
        waiting=int(taken[-1, 1]) - _length(taken) if len(taken) else 0,
        problems=problems,
        examples=[text for name, ranges in kinds.items() for text in _examples(name, ranges)],
    )


def _read(step: Step, before: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return (replica, stream, start position) for each section of a stream that was trained in a step.

    The start position is the one that the replica recorded; if its line is missing from the commit log, it is the
    expected position in ``before``. Without SPARe each replica reads its own stream. With SPARe, in which several
    replicas (groups) can compute the same part of the data (shard type), there is one stream for each shard type.
    """
    commit = step.commit
    if commit.stack is None:
        ats = {replica: own.at for replica, own in step.by.items() if own.at is not None}
        return [(replica, replica, ats.get(replica, before.get(replica, 0))) for replica in set(commit.healthy)]
    found = [
        (replica, kind, at)
        for replica, own in step.by.items()
        if replica in commit.healthy and own.computed is not None
        for kind, at in own.computed.items()
    ]
    reported = {replica for replica, own in step.by.items() if own.computed is not None}
    silent = [(group, kind) for kind, group in enumerate(commit.owners) if group not in reported]
    return found + [(group, kind, before.get(kind, 0)) for group, kind in silent]


class _Reads:
    """The sections of each stream of samples that replicas read; consecutive sections are merged."""

    def __init__(self):
        self._sections: dict[tuple[SampleAssignment, int], list[list[int]]] = {}

    def add(self, commit: Commit, replica: int, begin: int) -> None:
        sections = self._sections.setdefault((commit.assignment, replica), [])
        if sections and sections[-1][1] == begin:
            sections[-1][1] += commit.batch
        else:
            sections.append([begin, begin + commit.batch])

    def ranges(self) -> list[numpy.ndarray]:
        """Return an (n, 2) array of ranges of samples for each section."""
        return [
            assignment.stream(replica).ranges(begin, end)
            for (assignment, replica), sections in self._sections.items()
            for begin, end in sections
        ]


def _carried(last: Commit, commit: Commit) -> dict[int, int]:
    """Return the positions before ``commit`` according to ``last``, the previous commit.

    If the sample assignment has changed, the positions are converted to the new one.
    """
    if commit.assignment == last.assignment:
        return dict(last.positions)
    _, positions = last.assignment.after(last.positions, last.step, commit.assignment.replicas, commit.assignment.block)
    return positions


def _contradictions(last: Commit, commit: Commit, before: Mapping[int, int]) -> list[str]:
    found = []
    if commit.assignment != last.assignment:
        expected, _ = last.assignment.after(
            last.positions, last.step, commit.assignment.replicas, commit.assignment.block
        )
        if expected != commit.assignment:
            found.append(
                f"step {commit.step}: the new assignment does not start from the positions after step {last.step}"
            )
    for replica, position in sorted(_carried(last, commit).items()):
        if before.get(replica, 0) != position:
            found.append(
                f"step {commit.step}: replica {replica} was at position {position} after the previous step, "
                f"but this step starts it at {before.get(replica, 0)}"
            )
    return found


def _misread(step: Step, before: Mapping[int, int]) -> list[str]:
    found = []
    for replica, commit in step.by.items():
        should = before.get(replica, 0)
        if replica in commit.healthy and commit.at is not None and commit.at != should:
            found.append(
                f"step {commit.step}: replica {replica} read from position {commit.at} on, but was at {should}"
            )
        for kind, at in (commit.computed or {}).items() if replica in commit.healthy else ():
            if at != before.get(kind, 0):
                found.append(
                    f"step {commit.step}: group {replica} read shard type {kind} from position {at} on, but "
                    f"it was at {before.get(kind, 0)}"
                )
    return found


def _compare(trained: numpy.ndarray, taken: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """Return kind of error -> (n, 2) array of sample ranges; a sample trained three times counts as two duplicates."""
    borders = numpy.unique(numpy.concatenate([trained.ravel(), taken.ravel()]))
    if not len(borders):
        return {"duplicates": _NOTHING, "gaps": _NOTHING, "unaccounted": _NOTHING}
    pieces = numpy.stack([borders[:-1], borders[1:]], axis=1)
    times, counted = (_covered(borders, ranges) for ranges in (trained, taken))
    return {
        "duplicates": numpy.repeat(pieces, numpy.maximum(times - 1, 0), axis=0),
        "gaps": pieces[(times == 0) & (counted > 0)],
        "unaccounted": pieces[(times > 0) & (counted == 0)],
    }


def _covered(borders: numpy.ndarray, ranges: numpy.ndarray) -> numpy.ndarray:
    """Return how many of ``ranges`` cover each piece between two consecutive borders."""
    change = numpy.zeros(len(borders), numpy.int64)
    numpy.add.at(change, numpy.searchsorted(borders, ranges[:, 0]), 1)
    numpy.add.at(change, numpy.searchsorted(borders, ranges[:, 1]), -1)
    return numpy.cumsum(change)[:-1]


def _minus(ranges: numpy.ndarray, without: numpy.ndarray) -> numpy.ndarray:
    return _compare(without, ranges)["gaps"]


def _length(ranges: numpy.ndarray) -> int:
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def _examples(name: str, ranges: numpy.ndarray) -> list[str]:
    whole = merged(ranges)
    shown = ", ".join(f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in whole[:_MOST_EXAMPLES])
    more = f" and {len(whole) - _MOST_EXAMPLES} more ranges" if len(whole) > _MOST_EXAMPLES else ""
    return [f"{name}: sample {shown}{more}"] if len(whole) else []


def has_stacks(steps: Sequence[Step]) -> bool:
    """Return whether the run uses SPARe, that is, whether any commit records a stack."""
    return any(step.commit.stack is not None for step in steps)


def stacks_line(steps: Sequence[Step]) -> str:
    """Return one line of text: the mean and the largest stack of the steps, and the number of patch computes."""
    depths = [depth(step) for step in steps]
    patched = [step for step in steps if step.commit.patch]
    types, covered = (sum(len(getattr(step.commit, name)) for step in steps) for name in ("patch", "covered"))
    return (
        f"{statistics.mean(depths):.2f} per step (mean), {max(depths)} at most; "
        f"{count(types, 'patch compute')} in {count(len(patched), 'step')}, "
        f"{count(covered, 'lost shard')} had been computed by another group"
    )


def wipe_outs_line(steps: Sequence[Step]) -> str:
    """Return one line of text: the steps with types that had no host, and what these have cost; "" without any.

    The cost of a step is the share of its time that the group with the most types has spent on such types.
    """
    wiped = [step for step in steps if step.commit.adopted]
    if not wiped:
        return ""
    shards = sum(len(step.commit.adopted) for step in wiped)
    spent_s = sum(step.commit.step_s * (1 - depth(step, adopted=False) / depth(step)) for step in wiped)
    share = spent_s / sum(step.commit.step_s for step in wiped) if spent_s else 0.0
    return (
        f"in {count(len(wiped), 'step')} no host of a shard type was left: others computed {count(shards, 'shard')}, "
        f"which took {seconds(spent_s)} ({percent(share)} of these steps); no sample was lost"
    )


def depth(step: Step, adopted: bool = True) -> int:
    """Return the largest number of shard types that one group computed in the step, patch computes included;
    ``adopted``: whether types count that had no host.
    """
    commit = step.commit
    extra = Counter(
        group
        for kind, group in enumerate(commit.owners)
        if kind in commit.patch and (adopted or kind not in commit.adopted)
    )
    return max(extra.values(), default=0) + (commit.stack or 1)
