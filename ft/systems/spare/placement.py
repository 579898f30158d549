"""The placement of shard types in SPARe: which group hosts which types, in which initial order (SPARe, definition B.1).

A shard type is one of N parts of a global batch, a group is one of N replicas of the model, and a group's stack is the
ordered list of the r types that it can compute (r is the redundancy).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
