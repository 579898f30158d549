"""Collectives of a few bytes over all ranks through a tree of small process groups.

A gloo group connects every pair of its members, and its all-reduce passes 2 (n - 1) messages around a ring one after
the other. With thousands of ranks neither is possible in every step. Here every inner rank of a tree has a group with
its children. A rank is in at most two such groups, so it has at most 2 ``FAN_OUT`` connections in any world, and a
collective takes one hop up and one hop down per level.

A world that fits into one such group is one: then a collective is gloo's own all-reduce.
"""

import itertools
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ft.base import bounded_json
from ft.state.groups.local import Ended
from ft.state.groups.state import EpochState

FAN_OUT = 16
"""Maximum number of children of a rank."""


@dataclass(frozen=True)
class TreeShape:
    """Shape of a tree: places 0 to ``size`` - 1; place 0 is the root, and each place has up to ``fan_out`` children."""

    size: int
    fan_out: int = FAN_OUT

    def parent(self, place: int) -> int | None:
        """Return the parent of ``place``; None for the root."""
        return (place - 1) // self.fan_out if place else None

    def subtree(self, top: int) -> list[int]:
        """Return the places of the subtree below and with ``top``, level by level."""
        found, level = list[int](), [top]
        while level:
            found += level
            level = list(itertools.chain.from_iterable(self.children(place) for place in level))
        return found

    def children(self, place: int) -> range:
        """Return the children of ``place``, possibly none."""
        first = place * self.fan_out + 1
        return range(min(first, self.size), min(first + self.fan_out, self.size))

    def inner(self) -> range:
        """Return all places that have children."""
        return range(-(-(self.size - 1) // self.fan_out))

    @property
    def depth(self) -> int:
        """Return the number of hops from the root to the place that is farthest away."""
        hops, place = 0, self.size - 1
        while place > 0:
            place, hops = (place - 1) // self.fan_out, hops + 1
        return hops


_COMBINE: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.SUM: torch.add,
}


class Tree:
    """Collectives over all ranks of the default group, in host memory.

    All ranks have to construct it at the same time. All ranks have to call the same methods in the same order, and
    start an operation only when the last one that they started has ended.

    Operations raise what operations of the groups raise: with groups that follow epochs (``ft.state.groups``), every
    operation raises ``EpochClosed`` once the epoch is closed, also on ranks that wait for a relay.

    Args:
        purpose: description of the groups.
        fan_out: maximum number of children of a rank; None: ``FAN_OUT``.
    """

    def __init__(self, purpose: str, fan_out: int | None = None):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._shape = TreeShape(self.size, fan_out or FAN_OUT)
        self._above: dist.ProcessGroup | None = None  # the group of this rank's parent
        self._below: dist.ProcessGroup | None = None  # the group of this rank's children
        for inner in self._shape.inner():
            members = [inner, *self._shape.children(inner)]
            group = dist.new_group(members, backend="gloo", group_desc=purpose)
            if inner == self.rank:
                self._below = group
            elif self.rank in members:
                self._above = group
        self._is_flat = self._shape.depth <= 1
        if not self._is_flat:
            self._relay = _Relay(purpose, getattr(self._above or self._below, "state", None))

    def start(self, word: torch.Tensor, op: dist.ReduceOp.RedOpType) -> dist.Work:
        """Start an all-reduce; the operation runs in the background.

        Args:
            word: [n], int32 or int64: this rank's values; they are overwritten by the result.
            op: MIN, MAX or SUM.
        """
        if self.size == 1:
            return Ended()
        if self._is_flat:
            work: dist.Work = dist.all_reduce(word, op=op, group=self._below or self._above, async_op=True)
            return work
        return self._relay.start(lambda: self._all_reduce(word, op))

    def all_reduce(self, word: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce as ``start`` does, and wait for the result."""
        self.start(word, op).wait()

    def broadcast(self, values: torch.Tensor) -> None:
        """Copy rank 0's ``values``, [n] of any type, to ``values`` of all ranks."""
        self._run(lambda: self._spread(values))

    def gather(self, row: torch.Tensor) -> torch.Tensor | None:
        """Return the rows of all ranks on rank 0, and None on other ranks.

        Args:
            row: [n], int64 or uint8: this rank's row, of the same length on all ranks.

        Returns:
            [size, n], by rank.
        """
        found: list[torch.Tensor | None] = []
        self._run(lambda: found.append(self._collect(row)))
        return found[0]

    def _run(self, operation: Callable[[], object]) -> None:
        if self._is_flat:
            operation()
        else:
            self._relay.start(operation).wait()

    def _all_reduce(self, word: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self._below is not None:
            for part in self._from_children(word):
                _COMBINE[op](word, part, out=word)
        if self._above is not None:
            dist.gather(word, group=self._above, group_dst=0)
        self._spread(word)

    def _spread(self, values: torch.Tensor) -> None:
        if self._above is not None:
            dist.broadcast(values, group=self._above, group_src=0)
        if self._below is not None:
            dist.broadcast(values, group=self._below, group_src=0)

    def _collect(self, row: torch.Tensor) -> torch.Tensor | None:
        """Gather the rows of the ranks below, and pass them on; the rows of a subtree are in its breadth-first order.

        A gather needs parts of equal length: each is as long as that of the first child, whose subtree is the largest.
        """
        own = self._shape.subtree(self.rank)
        rows = torch.zeros(len(own), row.numel(), dtype=row.dtype, device="cpu")
        rows[0] = row
        if self._below is not None:
            place = {rank: at for at, rank in enumerate(own)}
            children = self._shape.children(self.rank)
            longest = len(self._shape.subtree(children[0]))
            padded = torch.zeros(longest, row.numel(), dtype=row.dtype, device="cpu")
            for child, part in zip(children, self._from_children(padded), strict=True):
                ranks = self._shape.subtree(child)
                rows[[place[rank] for rank in ranks]] = part[: len(ranks)]
        parent = self._shape.parent(self.rank)
        if parent is None:
            return rows  # breadth-first order from the root is the order of the ranks
        longest = len(self._shape.subtree(self._shape.children(parent)[0]))
        padded = torch.zeros(longest, row.numel(), dtype=row.dtype, device="cpu")
        padded[: len(rows)] = rows
        dist.gather(padded, group=self._above, group_dst=0)
        return None

    def _from_children(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(own, device="cpu") for _ in range(1 + len(self._shape.children(self.rank)))]
        dist.gather(own, parts, group=self._below, group_dst=0)
        return parts[1:]


def tell(tree: Tree, values: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON values of the one rank that has any; the other ranks give an empty dict.

    All ranks have to call it at the same time. It takes two all-reduces: of the length, and of the bytes.
    """
    text = json.dumps(values).encode() if values else b""
    length = torch.tensor([len(text)], dtype=torch.int32, device="cpu")
    tree.all_reduce(length, dist.ReduceOp.MAX)
    word = torch.zeros(int(length.item()), dtype=torch.int32, device="cpu")
    word[: len(text)] = torch.tensor(list(text), dtype=torch.int32, device="cpu")
    tree.all_reduce(word, dist.ReduceOp.MAX)
    found: dict[str, Any] = bounded_json.loads(bytes(word.tolist()), non_finite=True)
    return found


class _Started(dist.Work):
    """An operation in the relay's thread."""

    def __init__(self, run: Callable[[], object], purpose: str, state: EpochState | None):
        super().__init__()
        self._run, self._purpose, self._state = run, purpose, state
        self.ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self.ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._state is not None:
            self._state.begins_to_wait(self._purpose)
        try:
            self.ended.wait()
        finally:
            if self._state is not None:
                self._state.has_waited()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class _Relay:
    """The thread in which a rank executes its operations, so that it relays messages while its trainer computes.

    Args:
        purpose: name of the tree.
        state: state of the groups if they follow epochs. Connections of such groups are dropped only while no operation
            is under way: an operation of a closed epoch would otherwise continue on the connections of the next one.
    """

    def __init__(self, purpose: str, state: EpochState | None):
        self._purpose, self._state = purpose, state
        self._orders: queue.SimpleQueue[_Started] = queue.SimpleQueue()
        self._last: _Started | None = None
        if state is not None:
            state.before_drop.append(self._settle)
        threading.Thread(target=self._serve, name=f"ft-tree-{purpose}", daemon=True).start()

    def start(self, run: Callable[[], object]) -> _Started:
        self._last = _Started(run, self._purpose, self._state)
        self._orders.put(self._last)
        return self._last

    def _settle(self) -> None:
        if (last := self._last) is not None:
            last.ended.wait()

    def _serve(self) -> None:
        while True:
            self._orders.get().run()
