"""What the controller's core works on: flat sequences, lists where interpreted and arrays where compiled."""

from typing import Any, NamedTuple

Numbers = Any  # list[int] or int64 array

NONE = -1

FOREVER = 2**62

GROUPS, REDUNDANCY, STACK, SURVIVORS, MOVES, SEEKERS, CHANGED, SEARCH, LEVEL, TAIL, LATER, SEEN, SHIFTED = range(13)
"""Places in ``State.size``."""


class State(NamedTuple):
    """N groups, redundancy r. The first part is the layout, the second follows from it, the third is room to work in.

    Attributes:
        size: N, r, S, the number of surviving groups; of moves, of seekers, of types in ``changed``; the number of the
            present search, how far it has come; the lengths of ``queue``, ``later``, ``seen`` and ``shifted``.
        orders: [N r] the type of group w at position p is at w r + p. owner: [N] the group that computes a type.
        alive: [N] 1 or 0.

        hosts: [N r] the group that holds type t at mark j is at t r + j. mark: [N] the j with g_j = d mod N, or NONE.
        depth: [N r] the position of type t in its host at mark j is at t r + j. load: [N] types that a group owns.
        cover: [N] survivors with a type among their first S. living: [N] surviving hosts of a type.

        seekers: [N] types without an owner, ascending. moves: [4 N] group, type, from, to.
        changed: [N] types whose owner may be another than before. former: [N] that owner. marked: [N] 1 if in changed.
        kind_potential, group_potential: [N] of types and of groups. kind_distance, distance: [N] the same.
        shifted: [2 N] types, and N + groups, whose potential is not 0. before: [N] the type from which a group was
            reached. queue: [N] types. seen: [N] groups that were reached. later: [N r] groups further away.
        reached, tentative: [N] the last search in which a group was reached for good (FOREVER: it is lost), and in
            which it got a distance.
    """

    size: Numbers
    orders: Numbers
    owner: Numbers
    alive: Numbers
    hosts: Numbers
    mark: Numbers
    depth: Numbers
    load: Numbers
    cover: Numbers
    living: Numbers
    seekers: Numbers
    moves: Numbers
    changed: Numbers
    former: Numbers
    marked: Numbers
    kind_potential: Numbers
    group_potential: Numbers
    kind_distance: Numbers
    distance: Numbers
    before: Numbers
    queue: Numbers
    seen: Numbers
    shifted: Numbers
    later: Numbers
    reached: Numbers
    tentative: Numbers
