"""Read the saved state of SPARe's reordering controller, for example from a checkpoint."""

from typing import Any, NamedTuple

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.controller.cover import covered
from ft.systems.spare.controller.state import FOREVER, STACK, SURVIVORS, State
from ft.systems.spare.placement import Placement


class Saved(NamedTuple):
    """A saved state of the controller, for N groups and N shard types of which each group hosts r.

    Attributes:
        placement: the initial placement of types on groups.
        stack: S, the number of types that each group computes.
        alive: which groups are alive, bool [N].
        orders: the type at each stack position of each group, int64 [N, r].
        owners: the group that computes each type, int64 [N].
    """

    placement: Placement
    stack: int
    alive: np.ndarray
    orders: np.ndarray
    owners: np.ndarray


def read(values: dict[str, Any]) -> Saved:
    """Return the state that ``Controller.state`` saved.

    Raises:
        UserError: something is missing or has the wrong type, or the state is not valid for a controller.
    """
    try:
        placement = Placement(int(values["groups"]), tuple(values["ruler"]))
        found = Saved(
            placement,
            int(values["stack"]),
            np.isin(np.arange(placement.groups), np.array(values["alive"], dtype=np.int64)),
            np.array(values["orders"], dtype=np.int64),
            np.array(values["owners"], dtype=np.int64),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the saved state of the controller cannot be read: {error!r}", _FIX) from error
    if not _sound(found):
        raise UserError("the saved state of the controller contradicts itself", _FIX)
    return found


def fill(s: State, found: Saved) -> None:
    """Overwrite ``s``, an initial state of the core, with the saved state ``found``."""
    n, r = found.orders.shape
    mark = np.zeros(n, dtype=np.int64)
    mark[np.array(found.placement.ruler) % n] = np.arange(r)
    depth = np.zeros((n, r), dtype=np.int64)
    depth[found.orders, mark[(found.orders - np.arange(n)[:, None]) % n]] = np.arange(r)
    cover = np.bincount(found.orders[found.alive, : found.stack].ravel(), minlength=n)
    values = {
        "orders": found.orders.ravel(),
        "owner": found.owners,
        "alive": found.alive.astype(np.int64),
        "depth": depth.ravel(),
        "load": np.bincount(found.owners, minlength=n),
        "cover": cover,
        "reached": np.where(found.alive, 0, FOREVER),
        "living": found.alive[found.placement.host_table].sum(axis=1),
    }
    for name, numbers in values.items():
        getattr(s, name)[:] = numbers if isinstance(s.owner, np.ndarray) else numbers.tolist()
    s.size[STACK], s.size[SURVIVORS] = found.stack, int(found.alive.sum())


def _sound(found: Saved) -> bool:
    n, r = found.placement.groups, found.placement.redundancy
    if found.orders.shape != (n, r) or found.owners.shape != (n,) or not 1 <= found.stack <= r:
        return False
    if not np.array_equal(np.sort(found.orders), np.sort(found.placement.orders())):
        return False
    if found.owners.min() < 0 or found.owners.max() >= n or not found.alive[found.owners].all():
        return False
    first = found.orders[found.owners, : found.stack]
    at_home = (first == np.arange(n)[:, None]).any(axis=1).all()
    return bool(at_home and covered(found.orders, found.alive, found.stack).all())


_FIX = "start from a state that this version has saved, or from a new controller"
