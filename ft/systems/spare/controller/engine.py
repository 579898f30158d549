"""Run the core of SPARe's reordering controller compiled by numba if requested and installed, else interpreted."""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller import core, search, state
from ft.systems.spare.placement import Placement


@dataclass(frozen=True)
class Engine:
    """The functions of :mod:`ft.systems.spare.controller.core`, compiled or interpreted.

    Attributes:
        name: "numba" or "interpreted".
        lose: removes failed groups (``core.lose``).
        missing: lists the types that only failed groups have computed in a step (``core.missing``).
        bring_back: adds a group that has returned (``core.bring_back``).
        trial: removes groups one by one until a shard type has no host left (``core.trial``).
        start: sets a state to the initial layout (``core.start``).
        numbers: converts integers to the sequences that these functions take: arrays if compiled, else lists.
    """

    name: str
    lose: Callable
    missing: Callable
    bring_back: Callable
    trial: Callable
    start: Callable
    numbers: Callable[[Any], Any]


def engine(accelerate: bool | None = None) -> Engine:
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


def state_of(placement: Placement, chosen: Engine) -> state.State:
    """Return a new state of the controller's core, in which all groups are alive and no shard type has moved.

    Args:
        placement: which group hosts which shard types.
        chosen: the engine whose functions will take the state.
    """
    n, r = placement.groups, placement.redundancy
    mark = np.full(n, state.NONE)
    mark[np.array(placement.ruler) % n] = np.arange(r)
    lengths = {"orders": n * r, "depth": n * r, "moves": 4 * n, "later": n * r, "shifted": 2 * n}
    given = {"size": [n, r, 1, n, *[0] * 9], "hosts": placement.host_table.ravel(), "mark": mark}
    made = state.State(
        **{
            name: chosen.numbers(given[name] if name in given else np.zeros(lengths.get(name, n), dtype=np.int64))
            for name in state.State._fields
        }
    )
    chosen.start(made, initial(placement, chosen))
    return made


def initial(placement: Placement, chosen: Engine) -> Any:
    """Return the initial order of shard types of all groups, flattened from [N, r], as ``chosen.start`` takes it."""
    return chosen.numbers(placement.orders().ravel())


def _list(numbers: Any) -> list[int]:
    return np.asarray(numbers).tolist()


def _array(numbers: Any) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


INTERPRETED = Engine("interpreted", core.lose, core.missing, core.bring_back, core.trial, core.start, _list)

_SOURCES = (__file__, core.__file__, search.__file__, state.__file__)


@cache
def _compiled() -> Engine:
    import numba
    from numba.extending import register_jitable

    # Without reference counts: the caller holds the two dozen arrays of a state, and every call of a helper would
    # otherwise increment and decrement the count of each.
    options = {"_nrt": False}
    for module in (core, search):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                register_jitable(**options)(getattr(module, name))
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
    return Engine("numba", *compiled, _array)
