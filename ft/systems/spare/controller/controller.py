"""The controller's state, and what a loss or a return makes of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller import core, saved, state
from ft.systems.spare.controller.cover import covered, wiped_out
from ft.systems.spare.controller.engine import engine, initial, state_of
from ft.systems.spare.placement import Placement


class Move(NamedTuple):
    """A type that comes among the first S of a group; the one in its place goes where it was.

    Attributes:
        group: whose stack. kind: the type. from_position: None in a group that returns, which had no order to keep.
        to_position: below S.
    """

    group: int
    kind: int
    from_position: int | None
    to_position: int


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

    S is always the least possible, and as few types as possible move. The same losses and returns in the same order
    give the same orders on every machine, compiled or not.

    Args:
        placement: where it starts, with all groups alive and S = 1.
        accelerate: whether numba compiles it, None where it is installed. Interpreted calls take a fraction of a
            millisecond at 1000 groups, so that this is for whoever makes thousands of them.

    Attributes:
        groups: N. redundancy: r. placement: as given.
    """

    def __init__(self, placement: Placement, accelerate: bool | None = False):
        self.placement = placement
        self.groups, self.redundancy = placement.groups, placement.redundancy
        self._engine = engine(accelerate)
        self._state = state_of(placement, self._engine)

    @property
    def stack(self) -> int:
        """S: after so many types of its order a group takes part in the all-reduce."""
        return int(self._state.size[state.STACK])

    @property
    def alive(self) -> np.ndarray:
        """Which groups are in, bool [N]; a copy."""
        return np.array(self._state.alive, dtype=bool)

    @property
    def orders(self) -> np.ndarray:
        """The type at each stack position, int64 [N, r]; a copy. A lost group keeps its last order."""
        return np.array(self._state.orders, dtype=np.int64).reshape(self.groups, self.redundancy)

    @property
    def owners(self) -> np.ndarray:
        """The surviving group that has to compute each type, int64 [N]; a copy.

        It has the type among its first S; other groups may have it there too.
        """
        return np.array(self._state.owner, dtype=np.int64)

    def order(self, group: int) -> tuple[int, ...]:
        """The types of a group in the order of its stack."""
        first = group * self.redundancy
        return _as_tuple(self._state.orders[first : first + self.redundancy])

    def reset(self) -> None:
        """As at the start: every group alive, in its initial order, S = 1."""
        self._engine.start(self._state, initial(self.placement, self._engine))

    def lose(self, groups: Iterable[int]) -> Reordering:
        """Takes out groups that were lost at once.

        Raises:
            UserError: a group is out of range, given twice, or lost already.
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
        """Takes a lost group in again: S falls where it can, and as few types as possible move in the other groups.

        The group starts from its initial order, and whatever it has to compute costs nothing to move.

        Raises:
            UserError: the group is out of range, or not lost.
        """
        [group] = self._checked([group], lost=True)
        order = self._engine.numbers(self.placement.order(group))
        phase = int(self._engine.bring_back(self._state, group, order))
        return Reordering(self.stack, self._moves(), (), phase, ())

    def state(self) -> dict[str, Any]:
        """All of it, in JSON's types, for :meth:`restore`."""
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
        """The controller whose ``state`` these were.

        Raises:
            UserError: it is none that a controller can be in.
        """
        read = saved.read(values)
        made = cls(read.placement, accelerate)
        saved.fill(made._state, read)
        return made

    def _wipe_out(self, lost: list[int]) -> Reordering:
        alive = self.alive
        alive[lost] = False
        missing = np.flatnonzero(~covered(self.orders, alive, self.stack))
        gone = wiped_out(self.placement.host_table, alive)
        return Reordering(self.stack, (), _as_tuple(gone), core.DEEPENED, _as_tuple(missing))

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
                    "name each group once" if not lost else "name one that is",
                )
        if len(set(groups)) < len(groups):
            twice = next(group for group in groups if groups.count(group) > 1)
            raise UserError(f"group {twice} is named more than once", "name each group once")
        return groups


def _as_tuple(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers)
