"""The reordering controller of SPARe (SPARe, algorithm 2): its state, also as saved in a checkpoint, and its reaction
to lost and returning groups.

When groups are lost, the controller reorders the stacks of the survivors, and increases S, the number of types that
each group computes in a step, if it must, such that the survivors still compute every type. If a type has no surviving
host (a wipe-out), the run has to restart from a checkpoint. Which types the survivors compute without any reordering is
phase 0 of the algorithm (HK-Fixed). The core is run compiled by numba if requested and installed, else interpreted.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller import core
from ft.systems.spare.controller.core import FOREVER, STACK, SURVIVORS, StackState
from ft.systems.spare.placement import Placement


def wiped_out(hosts: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return the types of which no host survives, in ascending order.

    Args:
        hosts: the groups that host each type, int [N, r].
        alive: which groups are alive, bool [N].
    """
    return np.flatnonzero(~alive[hosts].any(axis=1))


@dataclass(frozen=True)
class CoreFunctions:
    """The functions of :mod:`ft.systems.spare.controller.core`, compiled or interpreted."""

    name: str
    lose: Callable
    missing: Callable
    bring_back: Callable
    trial: Callable
    start: Callable
    numbers: Callable[[Any], Any]


def engine(accelerate: bool | None = None) -> CoreFunctions:
    """Return the engine to use; both engines give the same results.

    Args:
        accelerate: whether to use numba; None: if it is installed. The first compilation takes seconds; later processes
            load the result in less than a second.

    Raises:
        UserError: numba is requested and cannot be imported.
    """
    if accelerate is False:
        return INTERPRETED
    try:
        return _compiled()
    except ImportError as error:
        if accelerate:
            raise UserError(f"numba cannot be used: {error}", "pip install 'megatron-ft[fast]'") from error
        return INTERPRETED


def state_of(placement: Placement, chosen: CoreFunctions) -> core.StackState:
    """Return a new state of the controller's core, in which all groups are alive and no shard type has moved."""
    n, r = placement.groups, placement.redundancy
    mark = np.full(n, core.NONE)
    mark[np.array(placement.ruler) % n] = np.arange(r)
    lengths = {"orders": n * r, "depth": n * r, "moves": 4 * n, "later": n * r, "shifted": 2 * n}
    given = {"size": [n, r, 1, n, *[0] * 9], "hosts": placement.host_table.ravel(), "mark": mark}
    made = core.StackState(
        **{
            name: chosen.numbers(given[name] if name in given else np.zeros(lengths.get(name, n), dtype=np.int64))
            for name in core.StackState._fields
        }
    )
    chosen.start(made, initial(placement, chosen))
    return made


def initial(placement: Placement, chosen: CoreFunctions) -> Any:
    """Return the initial order of shard types of all groups, flattened from [N, r], as ``chosen.start`` takes it."""
    return chosen.numbers(placement.orders().ravel())


def _list(numbers: Any) -> list[int]:
    return np.asarray(numbers).tolist()


def _array(numbers: Any) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


INTERPRETED = CoreFunctions("interpreted", core.lose, core.missing, core.bring_back, core.trial, core.start, _list)

_SOURCES = (__file__, core.__file__)


@cache
def _compiled() -> CoreFunctions:
    import numba
    from numba.extending import register_jitable

    # Without reference counts: the caller holds the two dozen arrays of a state, and every call of a helper would
    # otherwise increment and decrement the count of each.
    options = {"_nrt": False}
    for _, function in inspect.getmembers(core, inspect.isfunction):
        if function.__module__ == core.__name__:
            register_jitable(**options)(function)
    # Numba detects changes only in the file of the compiled function, so the cache folder is named by a hash of all
    # source files.
    digest = hashlib.sha256(b"".join(Path(path).read_bytes() for path in _SOURCES)).hexdigest()[:16]
    entries = (core.lose, core.missing, core.bring_back, core.trial, core.start)
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(Path(before or Path.home() / ".cache" / "megatron-ft") / f"spare-{digest}")
        compiled = [numba.njit(cache=True, **options)(entry) for entry in entries]
    except (RuntimeError, OSError):  # no cache folder is writable
        compiled = [numba.njit(**options)(entry) for entry in entries]
    finally:
        numba.config.CACHE_DIR = before
    return CoreFunctions("numba", *compiled, _array)


def _fill(s: StackState, placement: Placement, values: dict[str, Any]) -> None:
    """Overwrite ``s``, an initial state of the core, with the values of ``Controller.state``."""
    n, r, stack = placement.groups, placement.redundancy, int(values["stack"])
    alive = np.isin(np.arange(n), np.array(values["alive"], dtype=np.int64))
    orders = np.array(values["orders"], dtype=np.int64).reshape(n, r)
    owners = np.array(values["owners"], dtype=np.int64).reshape(n)
    mark = np.zeros(n, dtype=np.int64)
    mark[np.array(placement.ruler) % n] = np.arange(r)
    depth = np.zeros((n, r), dtype=np.int64)
    depth[orders, mark[(orders - np.arange(n)[:, None]) % n]] = np.arange(r)
    filled = {
        "orders": orders.ravel(),
        "owner": owners,
        "alive": alive.astype(np.int64),
        "depth": depth.ravel(),
        "load": np.bincount(owners, minlength=n),
        "cover": np.bincount(orders[alive, :stack].ravel(), minlength=n),
        "reached": np.where(alive, 0, FOREVER),
        "living": alive[placement.host_table].sum(axis=1),
    }
    for name, numbers in filled.items():
        getattr(s, name)[:] = numbers if isinstance(s.owner, np.ndarray) else numbers.tolist()
    s.size[STACK], s.size[SURVIVORS] = stack, int(alive.sum())


class Move(NamedTuple):
    """A type that moves into the first S positions of a group's stack, in exchange with the type at its new position.

    Attributes:
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
        accelerate: whether to compile the controller with numba; None: if numba is installed. An interpreted call takes
            a fraction of a millisecond with 1000 groups, so that compiling pays only for thousands of calls.
    """

    def __init__(self, placement: Placement, accelerate: bool | None = False):
        self.placement = placement
        self.groups, self.redundancy = placement.groups, placement.redundancy
        self._engine = engine(accelerate)
        self._state = state_of(placement, self._engine)

    @property
    def stack(self) -> int:
        """Return S, the number of types of its stack after which a group takes part in the all-reduce."""
        return int(self._state.size[core.STACK])

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
        return _as_tuple(self._state.seekers[: self._state.size[core.SEEKERS]])

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
        missing = self._state.seekers[: self._state.size[core.SEEKERS]]
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

        Checkpoints and transfers have checksums, so the values are not checked for contradictions.

        Raises:
            UserError: the values are those of another version.
        """
        try:
            made = cls(Placement(int(values["groups"]), tuple(values["ruler"])), accelerate)
            _fill(made._state, made.placement, values)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            fix = "start from a state that this version has saved, or from a new controller"
            raise UserError(f"the saved state of the controller cannot be read: {error!r}", fix) from error
        return made

    def _wipe_out(self, lost: list[int]) -> Reordering:
        alive = self.alive
        alive[lost] = False
        gone = wiped_out(self.placement.host_table, alive)
        return Reordering(self.stack, (), _as_tuple(gone), core.DEEPENED, self.missing(lost))

    def _moves(self) -> tuple[Move, ...]:
        numbers = _as_tuple(self._state.moves[: 4 * self._state.size[core.MOVES]])
        return tuple(
            Move(group, kind, None if start == core.NONE else start, end)
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
