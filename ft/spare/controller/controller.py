"""The controller's state, and what a loss or a return makes of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ft.errors import UserError
from ft.spare.controller.cover import covered, wiped_out
from ft.spare.controller.flow import min_cost, smallest_stack
from ft.spare.controller.layout import Move, rearrange
from ft.spare.placement import Placement

HELD, DEEPENED, MOVED = 0, 1, 2


@dataclass(frozen=True)
class Reordering:
    """What the controller decided.

    Attributes:
        stack: S from now on. moves: in ascending order of their types. wipe_out: the types that no group holds any
            more; then nothing was changed, and the caller restarts from a checkpoint and calls ``reset``.
        phase: in which the answer was found: 0, the committed orders held; 1, S changed and no type had to move
            (or a wipe-out was found); 2, types were moved. patch_types: those that the survivors' old first S
            positions do not hold, ascending: the interrupted step needs one more stack for them. Empty for a return.
    """

    stack: int
    moves: tuple[Move, ...]
    wipe_out: tuple[int, ...]
    phase: int
    patch_types: tuple[int, ...]


class Controller:
    """Keeps S and every group's order such that the survivors collect all types in their first S positions.

    S is always the least possible. The same losses and returns in the same order give the same orders everywhere.

    Args:
        placement: where it starts, with all groups alive and S = 1.

    Attributes:
        groups: N. redundancy: r. stack: S. alive: bool [N]. orders: the type at each stack position, int64 [N, r];
        a lost group keeps its last one. Read them, and change them by the methods alone.
    """

    def __init__(self, placement: Placement):
        self.placement = placement
        self.groups, self.redundancy = placement.groups, placement.redundancy
        self.reset()

    def reset(self) -> None:
        """As at the start: every group alive, in its initial order, S = 1."""
        self.stack = 1
        self.alive = np.ones(self.groups, dtype=bool)
        self.orders = self.placement.orders()

    def lose(self, groups: Iterable[int]) -> Reordering:
        """Takes out groups that were lost at once.

        Raises:
            UserError: a group is out of range, given twice, or lost already.
        """
        lost = self._checked(groups, alive=True)
        alive = self.alive.copy()
        alive[lost] = False
        missing = _as_tuple(np.flatnonzero(~covered(self.orders, alive, self.stack)))
        gone = _as_tuple(wiped_out(self.placement.host_table, alive))
        if gone:
            return Reordering(self.stack, (), gone, DEEPENED, missing)
        self.alive = alive
        if not missing:
            return Reordering(self.stack, (), (), HELD, ())
        stack = smallest_stack(self.placement.host_table, alive, self.stack)
        return self._commit(stack, missing)

    def bring_back(self, group: int) -> Reordering:
        """Takes a lost group in again: S falls where it can, and as few types as possible move in the other groups.

        The group starts from its initial order, and whatever it has to compute costs nothing to move.

        Raises:
            UserError: the group is out of range, or not lost.
        """
        [group] = self._checked([group], alive=False)
        self.alive[group] = True
        self.orders[group] = self.placement.order(group)
        stack = smallest_stack(self.placement.host_table, self.alive, 1)
        if stack == self.stack:
            return Reordering(stack, (), (), HELD, ())
        return self._commit(stack, (), returned=group)

    def state(self) -> dict[str, Any]:
        """All of it, in JSON's types, for :meth:`restore`."""
        return {
            "groups": self.groups,
            "ruler": list(self.placement.ruler),
            "stack": self.stack,
            "alive": [int(group) for group in np.flatnonzero(self.alive)],
            "orders": self.orders.tolist(),
        }

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Controller":
        """The controller whose ``state`` this was.

        Raises:
            UserError: it is none that a controller can be in.
        """
        try:
            made = cls(Placement(int(state["groups"]), tuple(state["ruler"])))
            made.stack = int(state["stack"])
            made.alive = np.isin(np.arange(made.groups), np.array(state["alive"], dtype=np.int64))
            made.orders = np.array(state["orders"], dtype=np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the saved state of the controller cannot be read: {error!r}", _STATE_FIX) from error
        same_types = made.orders.shape == (made.groups, made.redundancy) and np.array_equal(
            np.sort(made.orders), np.sort(made.placement.orders())
        )
        in_range = 1 <= made.stack <= made.redundancy
        if not (same_types and in_range and covered(made.orders, made.alive, made.stack).all()):
            raise UserError("the saved state of the controller contradicts itself", _STATE_FIX)
        return made

    def _commit(self, stack: int, missing: tuple[int, ...], returned: int | None = None) -> Reordering:
        owner, _ = min_cost(self.placement.host_table, self.orders, self.alive, stack, returned)
        moves = rearrange(self.orders, owner, stack, returned)
        self.stack = stack
        return Reordering(stack, moves, (), MOVED if moves else DEEPENED, missing)

    def _checked(self, groups: Iterable[int], alive: bool) -> list[int]:
        groups = [int(group) for group in groups]
        for group in groups:
            if not 0 <= group < self.groups:
                raise UserError(f"group {group} is not in 0 to {self.groups - 1}", "number groups from 0")
            if self.alive[group] != alive:
                raise UserError(f"group {group} is {'lost already' if alive else 'not lost'}", "name each group once")
        if len(set(groups)) < len(groups):
            twice = next(group for group in groups if groups.count(group) > 1)
            raise UserError(f"group {twice} is there more than once", "name each group once")
        return groups


_STATE_FIX = "start from a state that this version has saved, or from a new controller"


def _as_tuple(array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(item) for item in array)
