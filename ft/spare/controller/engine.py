"""The core as it is run: compiled where numba is installed and the state is large enough to pay, else interpreted."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ft.errors import UserError
from ft.spare.controller import core
from ft.spare.placement import Placement

WORTH_IT = 2000
"""Types that all groups hold together, from which on loading compiled code pays off in a controller's first calls."""


@dataclass(frozen=True)
class Engine:
    """The functions of ``core`` and what they work on: ``numbers`` turns integers into their kind of sequence."""

    name: str
    lose: Callable
    bring_back: Callable
    trial: Callable
    start: Callable
    numbers: Callable[[Any], Any]


def engine(placement: Placement, accelerate: bool | None = None) -> Engine:
    """The engine for a placement; the layouts are the same with either.

    Args:
        accelerate: whether to use numba. None: where it is installed and the placement is large.

    Raises:
        UserError: numba is asked for and not installed.
    """
    there = importlib.util.find_spec("numba") is not None
    if accelerate and not there:
        raise UserError("numba is not installed", "pip install 'megatron-ft[fast]', or leave it out")
    if accelerate is None:
        accelerate = there and placement.groups * placement.redundancy >= WORTH_IT
    return _compiled() if accelerate else INTERPRETED


def state_of(placement: Placement, chosen: Engine) -> core.State:
    """A state at its start."""
    n, r = placement.groups, placement.redundancy
    mark = np.full(n, core.NONE)
    mark[np.array(placement.ruler) % n] = np.arange(r)
    lengths = {"orders": n * r, "depth": n * r, "moves": 4 * n, "changed": n + 1, "later": n * r, "stamp": n + 1}
    given = {"size": [n, r, 1, n, 0, 0], "hosts": placement.host_table.ravel(), "mark": mark}
    made = core.State(
        **{
            name: chosen.numbers(given[name] if name in given else np.zeros(lengths.get(name, n), dtype=np.int64))
            for name in core.State._fields
        }
    )
    chosen.start(made, *initial(placement, chosen))
    return made


def initial(placement: Placement, chosen: Engine) -> tuple[Any, Any]:
    """(orders, depth) at the start, as ``core.start`` takes them."""
    depth = np.tile(np.arange(placement.redundancy), placement.groups)
    return chosen.numbers(placement.orders().ravel()), chosen.numbers(depth)


def _list(numbers: Any) -> list[int]:
    return np.asarray(numbers).tolist()


def _array(numbers: Any) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


INTERPRETED = Engine("interpreted", core.lose, core.bring_back, core.trial, core.start, _list)


@cache
def _compiled() -> Engine:
    import numba
    from numba.extending import register_jitable

    for name in ("settle", "add_seeker", "count_loads", "assign", "assign_all", "note", "augment", "reach", "nearest"):
        register_jitable(getattr(core, name))
    for name in ("shift", "hand_over", "arrange", "sort", "start", "lose"):
        register_jitable(getattr(core, name))
    entries = [getattr(core, name) for name in ("lose", "bring_back", "trial", "start")]
    try:
        compiled = [numba.njit(cache=True)(entry) for entry in entries]
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        compiled = [numba.njit(entry) for entry in entries]
    return Engine("numba", *compiled, _array)
