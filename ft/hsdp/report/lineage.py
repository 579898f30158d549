"""Which of the committed steps are in the state that survived.

A step may be committed by some replicas and not by others: then the others commit it again, in a later quorum, and the
first ones fetch that state, or were lost. The furthest commit is in the surviving state, and each commit names the one
before it; what is not on that chain was superseded.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ft.hsdp.commits import Commit

_MOST_SENTENCES = 50
_SHARED = ("healthy", "behind", "batch", "deal", "positions")

Key = tuple[int, int]
"""(quorum, step): the greater one is the later one."""


@dataclass(frozen=True)
class Step:
    """A committed step: what its members say of it, replica -> its own line."""

    by: Mapping[int, Commit]

    @property
    def commit(self) -> Commit:
        """A line of a healthy member, where one is on record."""
        healthy = [number for number in sorted(self.by) if number in self.by[number].healthy]
        return self.by[healthy[0] if healthy else min(self.by)]

    @property
    def number(self) -> int:
        return self.commit.step

    @property
    def when(self) -> float:
        """Wall time of the commit."""
        return statistics.median(commit.wall for commit in self.by.values())

    @property
    def loss(self) -> float | None:
        return next((commit.loss for commit in self.by.values() if commit.loss is not None), None)


@dataclass(frozen=True)
class Lineage:
    """The steps of the surviving state, in order, and all else that was committed.

    Attributes:
        missing: numbers (first, last) of steps that are in the state and on nobody's record.
        conflicts: sentences about members of one quorum that say different things of a step.
    """

    steps: list[Step] = field(default_factory=list)
    superseded: list[Step] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


def lineage(commits: Mapping[int, Sequence[Commit]]) -> Lineage:
    """The surviving steps among those that replicas committed (replica -> its lines)."""
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
    """Keys from the furthest commit back, and the steps missing between them."""
    chain: dict[Key, None] = {}
    missing = []
    older = sorted(steps)
    key = older[-1] if older else None
    while key is not None:
        chain[key] = None
        commit = steps[key].commit
        before = (commit.before, commit.step - 1)
        if before not in steps and commit.step > 1:
            while older and (older[-1] >= before or older[-1][1] >= commit.step - 1):
                older.pop()
            before = older[-1] if older else before
            if before in steps:
                missing.append((before[1] + 1, commit.step - 1))
        key = before if before in steps else None
    return chain, missing[::-1]


def _conflicts(step: Step) -> list[str]:
    first = step.commit
    found = []
    for replica, commit in step.by.items():
        names = [name for name in _SHARED if getattr(commit, name) != getattr(first, name)]
        if replica in commit.healthy and replica in first.members and commit.before != first.before:
            names.append("before")
        if names:
            found.append(
                f"step {first.step} of quorum {first.quorum}: replica {replica} has another {', '.join(names)}"
            )
    return found
