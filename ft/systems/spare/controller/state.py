"""The data of the core of SPARe's reordering controller (SPARe, algorithm 2), which decides what each group computes.

They are flat sequences of integers: lists if the core is interpreted, arrays if it is compiled by numba. In SPARe, each
group (replica of the model) hosts r of N shard types (parts of a global batch) in an order, its stack, and computes the
first S of them. The placement of types on groups is given by marks g_0 .. g_(r-1): group w hosts type (w + g_j) mod N.
"""

from typing import Any, NamedTuple

Numbers = Any  # list[int] or int64 array

NONE = -1
"""No group."""

FOREVER = 2**62
"""Value of ``State.reached`` for a lost group: a number greater than that of any search."""

GROUPS, REDUNDANCY, STACK, SURVIVORS, MOVES, SEEKERS, CHANGED, SEARCH, LEVEL, TAIL, LATER, SEEN, SHIFTED = range(13)
"""Indices in ``State.size``."""


class State(NamedTuple):
    """The state of the controller's core, for N groups and redundancy r.

    ``size`` to ``alive`` are the controller's decisions, ``hosts`` to ``living`` are derived from them or constant, and
    the other sequences are scratch space of the search for owners.

    Attributes:
        size: N, r, S, the number of surviving groups; the numbers of moves, of seekers, and of types in ``changed``;
            the number of the current search, its current distance; the lengths of ``queue``, ``later``, ``seen`` and
            ``shifted``. In the order of the indices GROUPS to SHIFTED.
        orders: [N r] the type of group w at position p is at w r + p.
        owner: [N] the group that has to compute a type.
        alive: [N] 1 or 0.
        hosts: [N r] the group that hosts type t by mark j is at t r + j.
        mark: [N] at index d: the j with g_j = d mod N, or NONE.
        depth: [N r] the position of type t in the stack of its host by mark j is at t r + j.
        load: [N] number of types that a group owns.
        cover: [N] number of survivors with a type in their first S positions.
        living: [N] number of surviving hosts of a type.
        seekers: [N] types without an owner, ascending.
        moves: [4 N] for each move in a stack: group, type, previous position or NONE, new position.
        changed: [N] types whose owner may have changed.
        former: [N] the previous owner of a type.
        marked: [N] 1 if the type is in ``changed``.
        kind_potential: [N] potentials of types.
        group_potential: [N] potentials of groups.
        kind_distance: [N] distances of types.
        distance: [N] distances of groups.
        before: [N] the type from which a group was reached.
        queue: [N] types that the search has reached, in ascending order of distance.
        seen: [N] groups that the search has reached, in ascending order of distance.
        shifted: [2 N] types, and N + groups, whose potential is not 0.
        later: [N r] groups at a greater distance, which the search has not reached yet.
        reached: [N] the last search in which a group was reached with its final distance (FOREVER: it is lost).
        tentative: [N] the last search in which a group got a distance.
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
