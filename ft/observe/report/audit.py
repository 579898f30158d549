"""Audit an FT-HSDP run: prove from its commit logs that every data sample was trained exactly once.

The audit compares two sets. The samples trained are those that the healthy replicas of each surviving step read: from
the position that the replica's data loader recorded (``at``) or, without such a record, from its position after the
previous step. The samples consumed are those that lie before the positions after the last step. Both are sets of
indices in the run's global order of samples, so the number of replicas may change during the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy

from ft.observe.report.lineage import Lineage, Step, before_of
from ft.systems.hsdp.commits import Commit
from ft.systems.hsdp.samples import SampleAssignment, merged

_MOST_EXAMPLES = 5
_NOTHING = numpy.empty((0, 2), numpy.int64)


@dataclass(frozen=True)
class Audit:
    """The result of an audit, in numbers of samples.

    Attributes:
        trained: samples trained in the surviving steps on record.
        replicas: replica -> samples that it trained.
        earlier: samples consumed before the first step on record.
        unproven: samples consumed in steps that are missing from the record.
        duplicates: repeated trainings of samples.
        gaps: samples that the state counts as consumed, but that were never trained (lost).
        unaccounted: samples that were trained, but that the state does not count as consumed yet.
        waiting: samples not consumed yet although samples after them in the global order are; the replicas that were
            absent will train them.
        problems: sentences about contradictions in the record.
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
