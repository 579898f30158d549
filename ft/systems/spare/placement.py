"""The placement of shard types in SPARe (which group hosts which types, in which initial order; SPARe, definition B.1),
and the plan of a run, as ``ft plan buy --spare-plan FILE`` writes it and ``ft run --ft-spare-plan FILE`` reads it.

A group's stack is the ordered list of the r types that it can compute. r is the redundancy, the number of groups that
host each type.
"""

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ft.base import bounded_json, files
from ft.base.errors import UserError


@dataclass(frozen=True)
class Placement:
    """A cyclic placement: group w hosts type ``(w + g_j) mod N`` at position j of its stack.

    Attributes:
        groups: N, the number of groups and of types.
        ruler: the marks g_0 .. g_(r-1). With any distinct marks, each group hosts r distinct types;
            ``ft.systems.spare.ruler.check`` checks whether any two types have at most one host in common.

    Raises:
        UserError: there are fewer than 2 groups or 2 marks, or two marks are the same mod N.
    """

    groups: int
    ruler: tuple[int, ...]

    def __post_init__(self):
        object.__setattr__(self, "ruler", tuple(int(mark) for mark in self.ruler))
        if self.groups < 2 or len(self.ruler) < 2:
            raise UserError(
                f"{self.groups} groups and redundancy {len(self.ruler)}: no loss can be compensated",
                "give 2 groups or more, and a redundancy of 2 or more",
            )
        if len({mark % self.groups for mark in self.ruler}) < len(self.ruler):
            raise UserError(
                f"ruler {list(self.ruler)}: a group of {self.groups} would hold one type twice",
                f"give marks that differ mod {self.groups}",
            )

    @property
    def redundancy(self) -> int:
        return len(self.ruler)

    def order(self, group: int) -> tuple[int, ...]:
        """Return the types of a group in the order of its stack before any reordering."""
        return tuple(int(kind) for kind in self.orders()[group])

    def hosts(self, kind: int) -> tuple[int, ...]:
        """Return the groups that host a type; the j-th of them has it at stack position j before any reordering."""
        return tuple(int(group) for group in self.host_table[kind])

    def orders(self) -> np.ndarray:
        """Return the initial order of every group as a new array, int64 [N, r]."""
        return (np.arange(self.groups)[:, None] + np.array(self.ruler)) % self.groups

    @cached_property
    def host_table(self) -> np.ndarray:
        """Return the hosts of every type as a read-only array, int64 [N, r]."""
        table = (np.arange(self.groups)[:, None] - np.array(self.ruler)) % self.groups
        table.setflags(write=False)
        return table

    @property
    def max_overlap(self) -> int:
        """Return the largest number of groups that host the same two types."""
        marks = np.array(self.ruler)
        differences = (marks[:, None] - marks)[~np.eye(len(marks), dtype=bool)] % self.groups
        return int(np.bincount(differences).max())


@dataclass(frozen=True)
class RunPlan:
    """What a plan says about a run."""

    redundancy: int
    save_interval: int


def read(path: str | os.PathLike, groups: int) -> RunPlan:
    """Return the plan for a run of ``groups`` groups.

    Args:
        path: the output of ``ft plan buy --spare-plan``; it may be for several numbers of groups.

    Raises:
        UserError: the file cannot be read, is not such an output, is for other numbers of groups, or recommends
            checkpoints alone.
    """
    fix = f"write it anew: ft plan buy --replicas {groups} ... --spare-plan FILE"
    try:
        found = bounded_json.loads(files.read(path))
        plans = {int(each["groups"]): each for each in (found if isinstance(found, list) else [found])}
        numbers = {
            size: (int(each["recommended"]), int(each["checkpoint_interval_steps"])) for size, each in plans.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--ft-spare-plan {path} cannot be read: {error!r}", fix) from error
    if groups not in numbers:
        sizes = ", ".join(map(str, sorted(numbers)))
        raise UserError(f"--ft-spare-plan {path} is for {sizes} groups, and the run has {groups}", fix)
    redundancy, interval = numbers[groups]
    if redundancy < 2 or interval < 1:
        raise UserError(f"--ft-spare-plan {path} recommends checkpoints alone, without SPARe", "drop --ft-spare-plan")
    return RunPlan(redundancy, interval)
