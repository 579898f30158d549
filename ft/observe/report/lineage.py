"""Determine which committed steps of an FT-HSDP run are part of its current training state (the surviving steps).

In a failure, some replicas may commit a step while others do not. The others then commit this step again in a later
quorum, and the former replicas fetch the new state, or are lost. Therefore the lineage starts from the latest commit
and follows the predecessor that each commit names. Commits outside of this chain are superseded: their results are no
longer in any replica's state. After a restart from a checkpoint, the steps committed since that checkpoint are
superseded.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ft.systems.hsdp.commits import Commit

_MOST_SENTENCES = 50
_SHARED = ("healthy", "behind", "batch", "assignment", "positions", "stack", "owners", "patch")

Key = tuple[int, int]
"""(quorum, step) of a commit; the greater key is the later commit."""


@dataclass(frozen=True)
class Step:
    """A committed step.

    Attributes:
        by: replica -> its line about the step in its commit log, for the replicas that committed the step.
    """

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

    @property
    def loss(self) -> float | None:
        return next((commit.loss for commit in self.by.values() if commit.loss is not None), None)


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
