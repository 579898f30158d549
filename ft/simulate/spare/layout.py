"""A quick reordering controller for simulations: the same stack as the real one, at a fraction of its cost.

Every surviving group computes the first S types of its order. A type of which the last copy went with a lost group is
brought into a surviving host by the shortest chain of displacements (breadth first), the last of which displaces a type
that another group computes too. Such a chain exists exactly if the types fit into the groups at depth S (augmenting
paths), so the stack is the smallest feasible one, as in phase 1 of Algorithm 2. Several lost types are placed one by
one, so more may move than in phase 2's optimum: the layout, and with it the chance of a patch compute, may differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Loss(NamedTuple):
    """What came of lost groups. ``wiped``: a type has no host left; ``patch``: a type of this step must be computed."""

    wiped: bool
    patch: bool


class QuickLayout:
    """The layout of one run.

    Args:
        orders: type at each stack position of each group, int [N, r]; each column holds every type once.

    Attributes:
        stack: S, so many stacks are computed in a step.
    """

    def __init__(self, orders: np.ndarray):
        self._initial = [tuple(order) for order in orders.tolist()]
        self._redundancy = orders.shape[1]
        self._hosts: list[list[int]] = [[] for _ in self._initial]
        for group, order in enumerate(self._initial):
            for shard in order:
                self._hosts[shard].append(group)
        self.reset()

    def reset(self) -> None:
        """As after a global restart: all groups, the initial orders, one stack."""
        self.stack, groups = 1, len(self._initial)
        self._orders = [list(order) for order in self._initial]
        self._alive, self._left = [True] * groups, groups
        self._copies, self._hosted = [1] * groups, [self._redundancy] * groups

    def lose(self, groups: Sequence[int]) -> Loss:
        """These groups are lost at once; after a wipe-out only :meth:`reset` may follow."""
        missing = []
        for group in groups:
            self._alive[group] = False
            for place, shard in enumerate(self._orders[group]):
                self._hosted[shard] -= 1
                if place < self.stack:
                    self._copies[shard] -= 1
                    if not self._copies[shard]:
                        missing.append(shard)
        self._left -= len(groups)
        if not self._left or any(not self._hosted[shard] for group in groups for shard in self._orders[group]):
            return Loss(True, False)
        while self.stack * self._left < len(self._initial):
            self._deepen()
        for shard in missing:
            while not self._copies[shard] and not self._place(shard):
                self._deepen()
        return Loss(False, bool(missing))

    def _deepen(self) -> None:
        for group, order in enumerate(self._orders):
            if self._alive[group]:
                self._copies[order[self.stack]] += 1
        self.stack += 1

    def _place(self, missing: int) -> bool:
        """Brings a type into the first S of a surviving host; False: there is no such chain of displacements."""
        came: dict[int, tuple[int, int]] = {}  # group: (type to be placed there, group that it is displaced from)
        queue = [(missing, -1)]
        alive, orders, copies, stack = self._alive, self._orders, self._copies, self.stack
        for shard, displaced_from in queue:
            for group in self._hosts[shard]:
                if not alive[group] or group in came:
                    continue
                came[group] = (shard, displaced_from)
                computed = orders[group][:stack]
                for other in computed:
                    if copies[other] > 1:
                        copies[other] -= 1
                        copies[missing] += 1
                        self._move(group, other, came)
                        return True
                queue.extend((other, group) for other in computed)
        return False

    def _move(self, group: int, displaced: int, came: dict[int, tuple[int, int]]) -> None:
        while group >= 0:
            shard, before = came[group]
            order = self._orders[group]
            first, second = order.index(displaced), order.index(shard)
            order[first], order[second] = order[second], order[first]
            group, displaced = before, shard
