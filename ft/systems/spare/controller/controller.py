"""The reordering controller of SPARe (SPARe, algorithm 2): its state, and its reaction to lost and returning groups.

A global batch is divided into N shard types, and each of N groups (replicas of the model) hosts r types, in an order
that is called its stack. Per step, the groups compute the first S types of their stacks. When groups are lost, the
controller reorders the stacks of the survivors, and increases S if it must, such that the survivors still compute every
type. If a type has no surviving host (a wipe-out), the run has to restart from a checkpoint.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller import core, saved, state
from ft.systems.spare.controller.cover import wiped_out
from ft.systems.spare.controller.engine import engine, initial, state_of
from ft.systems.spare.placement import Placement


class Move(NamedTuple):
    """A type that moves into the first S positions of a group's stack, in exchange with the type at its new position.

    Attributes:
        group: group whose stack changes.
        kind: the type.
        from_position: previous position; None in a group that returns, because its order begins anew.
        to_position: new position, less than S.
    """

    group: int
    kind: int
    from_position: int | None
    to_position: int


@dataclass(frozen=True)
class Reordering:
    """The decision of the controller after a loss or a return.

    Attributes:
        stack: S from now on.
        moves: moves in ascending order of their types.
        wipe_out: types that no surviving group hosts. If there are any, the controller has changed nothing, and the
            caller has to restart from a checkpoint and call ``reset``.
        phase: phase of SPARe, algorithm 2, in which the decision was found: 0, the orders remain valid; 1, S changed
            and no type had to move (or a wipe-out was found); 2, types were moved.
        patch_types: types that were not in the first S positions of any survivor before the loss, ascending: the
            survivors have to compute them in addition to complete the interrupted step (patch compute). Empty for a
            return.
    """

    stack: int
    moves: tuple[Move, ...]
    wipe_out: tuple[int, ...]
    phase: int
    patch_types: tuple[int, ...]


class Controller:
    """Maintains S and the stack of every group, so that the survivors have all types in their first S positions.

    S is always the least possible, and as few types as possible move. The same losses and returns in the same order
    give the same stacks on every machine, compiled or not.

    Args:
        placement: the initial placement, with all groups alive and S = 1.
        accelerate: whether to compile the controller with numba; None: if numba is installed. An interpreted call takes
            a fraction of a millisecond with 1000 groups, so that compiling pays only for thousands of calls.

    Attributes:
        groups: N, the number of groups and of types.
        redundancy: r, the number of types that a group hosts.
        placement: the initial placement.
    """

    def __init__(self, placement: Placement, accelerate: bool | None = False):
        self.placement = placement
        self.groups, self.redundancy = placement.groups, placement.redundancy
        self._engine = engine(accelerate)
        self._state = state_of(placement, self._engine)

    @property
    def stack(self) -> int:
        """Return S, the number of types of its stack after which a group takes part in the all-reduce."""
        return int(self._state.size[state.STACK])

    @property
    def alive(self) -> np.ndarray:
        """Return which groups are alive, as a new array, bool [N]."""
        return np.array(self._state.alive, dtype=bool)

    @property
    def orders(self) -> np.ndarray:
        """Return the type at each stack position as a new array, int64 [N, r]. A lost group keeps its last stack."""
        return np.array(self._state.orders, dtype=np.int64).reshape(self.groups, self.redundancy)

    @property
    def owners(self) -> np.ndarray:
        """Return the surviving group that has to compute each type, as a new array, int64 [N].

        The owner has the type in its first S positions; other groups may have the type there, too.
        """
        return np.array(self._state.owner, dtype=np.int64)

    def order(self, group: int) -> tuple[int, ...]:
        """Return the types of a group in the order of its stack."""
        first = group * self.redundancy
        return _as_tuple(self._state.orders[first : first + self.redundancy])

    def reset(self) -> None:
        """Return to the initial state: every group is alive, with its initial stack, and S is 1."""
        self._engine.start(self._state, initial(self.placement, self._engine))

    def missing(self, groups: Iterable[int]) -> tuple[int, ...]:
        """Return the types that no survivor has in its first S positions once ``groups`` are lost, ascending.

        The survivors have computed all other types of a step in which these groups are lost; the returned ones need a
        patch compute. The controller does not change.

        Raises:
            UserError: a group is out of range, given twice, or already lost.
        """
        self._engine.missing(self._state, self._engine.numbers(self._checked(groups, lost=False)))
        return _as_tuple(self._state.seekers[: self._state.size[state.SEEKERS]])

    def lose(self, groups: Iterable[int]) -> Reordering:
        """Remove groups that were lost at the same time, and return the decision.

        Raises:
            UserError: a group is out of range, given twice, or already lost.
        """
        lost = self._checked(groups, lost=False)
        if not lost:
            return Reordering(self.stack, (), (), core.HELD, ())
        phase = int(self._engine.lose(self._state, self._engine.numbers(lost)))
        if phase == core.WIPED_OUT:
            return self._wipe_out(lost)
        missing = self._state.seekers[: self._state.size[state.SEEKERS]]
        return Reordering(self.stack, self._moves(), (), phase, _as_tuple(missing))

    def bring_back(self, group: int) -> Reordering:
        """Add a lost group again, and return the decision.

        S becomes as small as possible, and as few types as possible move in the other groups. The stack of the group
        starts from its initial order, and moves in it do not count.

        Raises:
            UserError: the group is out of range, or not lost.
        """
        [group] = self._checked([group], lost=True)
        order = self._engine.numbers(self.placement.order(group))
        phase = int(self._engine.bring_back(self._state, group, order))
        return Reordering(self.stack, self._moves(), (), phase, ())

    def state(self) -> dict[str, Any]:
        """Return the whole state as JSON values, for :meth:`restore`."""
        return {
            "groups": self.groups,
            "ruler": list(self.placement.ruler),
            "stack": self.stack,
            "alive": [int(group) for group in np.flatnonzero(self.alive)],
            "orders": self.orders.tolist(),
            "owners": self.owners.tolist(),
        }

    @classmethod
    def restore(cls, values: dict[str, Any], accelerate: bool | None = False) -> "Controller":
        """Return a controller with the state that :meth:`state` has returned.

        Raises:
            UserError: the values are not a valid state of a controller.
        """
        read = saved.read(values)
        made = cls(read.placement, accelerate)
        saved.fill(made._state, read)
        return made

    def _wipe_out(self, lost: list[int]) -> Reordering:
        alive = self.alive
        alive[lost] = False
        gone = wiped_out(self.placement.host_table, alive)
        return Reordering(self.stack, (), _as_tuple(gone), core.DEEPENED, self.missing(lost))

    def _moves(self) -> tuple[Move, ...]:
        numbers = _as_tuple(self._state.moves[: 4 * self._state.size[state.MOVES]])
        return tuple(
            Move(group, kind, None if start == state.NONE else start, end)
            for group, kind, start, end in zip(*(numbers[i::4] for i in range(4)), strict=True)
        )

    def _checked(self, groups: Iterable[int], lost: bool) -> list[int]:
        groups = [int(group) for group in groups]
        for group in groups:
            if not 0 <= group < self.groups:
                raise UserError(f"group {group} is not in 0 to {self.groups - 1}", "groups are numbered from 0")
            if bool(self._state.alive[group]) == lost:
                raise UserError(
                    f"group {group} is {'not lost' if lost else 'lost already'}",
                    "name each group once" if not lost else "name a lost group",
                )
        if len(set(groups)) < len(groups):
            twice = next(group for group in groups if groups.count(group) > 1)
            raise UserError(f"group {twice} is named more than once", "name each group once")
        return groups


def _as_tuple(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)
