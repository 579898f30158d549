"""From who computes which type to the order of every stack."""

from typing import NamedTuple

import numpy as np


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


def rearrange(orders: np.ndarray, owner: np.ndarray, stack: int, free: int | None = None) -> tuple[Move, ...]:
    """Brings every type among the first ``stack`` of its owner's order, changing ``orders`` in place.

    A type that comes in takes the deepest position below ``stack`` whose type this group does not have to compute.

    Args:
        orders: int [N, r]. owner: the group of each type, int [N]. free: the group whose moves start from None.
    """
    at_home = (orders[owner, :stack] == np.arange(len(owner))[:, None]).any(axis=1)
    moves = []
    for kind in np.flatnonzero(~at_home):
        order = orders[owner[kind]]
        here = int(np.flatnonzero(order == kind)[0])
        there = int(np.flatnonzero(owner[order[:stack]] != owner[kind])[-1])
        order[here], order[there] = order[there], kind
        start = None if owner[kind] == free else here
        moves.append(Move(int(owner[kind]), int(kind), start, there))
    return tuple(moves)
