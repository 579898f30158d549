"""The core of SPARe's reordering controller (SPARe, algorithm 2): its data; the search for an owner of every shard type
at the least cost (phases 1 and 2, as one incremental search); the loss of groups, the return of a group, and a whole
Monte Carlo trial.

Each group hosts r of N shard types in an order, its stack, and computes the first S of them in every step. The
placement of types on groups is given by marks g_0 .. g_(r-1): group w hosts type (w + g_j) mod N. The *layout* is S and
the stacks of all groups, together with the owner of each type: the surviving group that has to compute it.

A group owns at most S types. This is a matching of types to groups, that is, a minimum-cost flow: a type costs 1 in a
group that does not have it in its first S positions (there it has to move), else 0. After a loss, a few types (the
seekers) have no owner. Each of them gets one along a shortest augmenting path, on which other types change their owner.
Successive shortest paths, with lengths corrected by node potentials, keep the total cost minimal. If there is no
augmenting path, no complete matching exists, so S is too small.

``h`` and ``t`` are the numbers of a group (host) and of a type. The functions are plain Python and work in place on the
flat sequences of integers of :class:`StackState`, so that numba can compile them unchanged: lists if the core is
interpreted, arrays if it is compiled. Compiled or not, they produce the same layout.
"""

from typing import Any, NamedTuple

Numbers = Any  # list[int] or int64 array

NONE = -1
"""No group."""

FOREVER = 2**62
"""Value of ``StackState.reached`` for a lost group: a number greater than that of any search."""

GROUPS, REDUNDANCY, STACK, SURVIVORS, MOVES, SEEKERS, CHANGED, SEARCH, LEVEL, TAIL, LATER, SEEN, SHIFTED = range(13)
"""Indices in ``StackState.size``."""


class StackState(NamedTuple):
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


def assign(s: StackState, stack: int, free: int) -> bool:
    """Find an owner for each of the seekers with S = ``stack``; return whether that is possible.

    If it is impossible, no owner is changed. ``s.changed`` lists the types whose owner may have changed. Group ``free``
    (or NONE) may take types at any position without cost.
    """
    s.size[CHANGED] = 0
    count = s.size[SEEKERS]
    possible = True
    for i in range(count):
        note(s, s.seekers[i])
        if stack > s.size[STACK]:  # else no survivor has it in its first positions
            settle(s, s.seekers[i], stack)
    for i in range(count):
        if possible and s.owner[s.seekers[i]] == NONE:
            possible = augment(s, s.seekers[i], stack, free)
    for i in range(s.size[CHANGED]):
        t = s.changed[i]
        s.marked[t] = 0
        if not possible:
            set_owner(s, t, s.former[t])
    forget_potentials(s)
    return possible


def assign_all(s: StackState, stack: int, free: int) -> bool:
    """Find owners for all types from the beginning; return whether that is possible.

    The arguments are those of ``assign``. On failure, ``s.owner`` and ``s.load`` are invalid; ``s.former`` is kept.
    """
    n = s.size[GROUPS]
    for i in range(n):
        s.load[i] = 0
        s.owner[i] = NONE
        s.marked[i] = 1  # so that ``note`` records nothing
    s.size[SEEKERS] = 0
    for t in range(n):
        settle(s, t, stack)
    possible = True
    for t in range(n):
        if possible and s.owner[t] == NONE:
            possible = augment(s, t, stack, free)
    for t in range(n):
        s.marked[t] = 0
    forget_potentials(s)
    return possible


def settle(s: StackState, t: int, stack: int) -> bool:
    """Assign type t to the first surviving host that has it in its first ``stack`` positions; False if none has it."""
    r = s.size[REDUNDANCY]
    for j in range(r):
        h = s.hosts[t * r + j]
        if s.alive[h] and s.depth[t * r + j] < stack:
            set_owner(s, t, h)
            return True
    return False


def set_owner(s: StackState, t: int, new: int) -> None:
    """Make group ``new``, or NONE, the owner of type t."""
    old = s.owner[t]
    if old != NONE:
        s.load[old] -= 1
    s.owner[t] = new
    if new != NONE:
        s.load[new] += 1


def note(s: StackState, t: int) -> None:
    """Record the owner of a type before it changes."""
    if not s.marked[t]:
        s.marked[t] = 1
        s.former[t] = s.owner[t]
        s.changed[s.size[CHANGED]] = t
        s.size[CHANGED] += 1


def augment(s: StackState, root: int, stack: int, free: int) -> bool:
    """Find an owner for type ``root`` along a shortest path; return False, with nothing changed, if there is none.

    Distances are small integers: all nodes at one distance are processed in FIFO order before those at the next
    distance.
    """
    s.size[SEARCH] += 1
    s.size[LEVEL] = 0
    s.size[LATER] = 0
    s.size[SEEN] = 0
    s.size[TAIL] = 1
    s.queue[0] = root
    s.kind_distance[root] = 0
    head = 0
    end = NONE if free != NONE else free_host(s, root, stack)
    while end == NONE:
        if head < s.size[TAIL]:
            end = relax_hosts(s, s.queue[head], stack, free)
            head += 1
        elif next_level(s):
            end = reach_hosts(s, stack)
        else:
            return False
    if s.size[SEEKERS] != 1:  # with a single seeker, no other search follows this one
        shift_potentials(s)
    while end != NONE:
        t = s.before[end]
        note(s, t)
        last = s.owner[t]
        set_owner(s, t, end)
        end = last
    return True


def free_host(s: StackState, root: int, stack: int) -> int:
    """Return the first host of type ``root`` (which has no owner) that owns fewer than ``stack`` types, or NONE.

    No path can be shorter than this one, because no host has the type in its first ``stack`` positions, and no
    potential is above 0. This is the most frequent case.
    """
    r = s.size[REDUNDANCY]
    for j in range(r):
        h = s.hosts[root * r + j]
        if s.load[h] < stack and s.alive[h]:
            s.before[h] = root
            s.size[LEVEL] = 1
            return h
    return NONE


def relax_hosts(s: StackState, t: int, stack: int, free: int) -> int:
    """Compute the distances of the hosts of type t; return a host with room at the same distance as t, or NONE."""
    r, level, search = s.size[REDUNDANCY], s.size[LEVEL], s.size[SEARCH]
    for j in range(r):
        h = s.hosts[t * r + j]
        if s.reached[h] >= search:  # this includes the owner of t, through which t was found
            continue
        far = level + s.kind_potential[t] - s.group_potential[h]
        if s.depth[t * r + j] >= stack and h != free:
            far += 1
        if far == level:
            s.distance[h] = level
            s.before[h] = t
            if reach(s, h, stack):
                return h
        elif s.tentative[h] != search or far < s.distance[h]:
            s.tentative[h] = search
            s.distance[h] = far
            s.before[h] = t
            s.later[s.size[LATER]] = h
            s.size[LATER] += 1
    return NONE


def next_level(s: StackState) -> bool:
    """Set the current distance to the least one of the groups in ``s.later``; return False if all are reached."""
    least = NONE
    for i in range(s.size[LATER]):
        h = s.later[i]
        if s.reached[h] != s.size[SEARCH] and (least == NONE or s.distance[h] < least):
            least = s.distance[h]
    s.size[LEVEL] = least
    return least != NONE


def reach_hosts(s: StackState, stack: int) -> int:
    """Mark the groups in ``s.later`` that are at the current distance as reached; return one with room, or NONE."""
    kept = 0
    for i in range(s.size[LATER]):
        h = s.later[i]
        if s.reached[h] == s.size[SEARCH]:
            continue
        if s.distance[h] > s.size[LEVEL]:
            s.later[kept] = h
            kept += 1
        elif reach(s, h, stack):
            return h
    s.size[LATER] = kept
    return NONE


def reach(s: StackState, h: int, stack: int) -> bool:
    """Mark a group as reached; return True if it has room for a type, else append its types to the queue."""
    s.reached[h] = s.size[SEARCH]
    s.seen[s.size[SEEN]] = h
    s.size[SEEN] += 1
    left = s.load[h]
    if left < stack:
        return True
    i = h * s.size[REDUNDANCY]
    while left > 0:
        t = s.orders[i]
        i += 1
        if s.owner[t] == h:
            s.kind_distance[t] = s.distance[h]
            s.queue[s.size[TAIL]] = t
            s.size[TAIL] += 1
            left -= 1
    return False


def shift_potentials(s: StackState) -> None:
    """Update the node potentials for the next search.

    The potential of every node nearer than the end of the path grows by its distance minus the distance of the end.
    ``s.queue`` and ``s.seen`` are in ascending order of distance.
    """
    n, level = s.size[GROUPS], s.size[LEVEL]
    for i in range(s.size[TAIL]):
        t = s.queue[i]
        if s.kind_distance[t] == level:
            break
        if s.kind_potential[t] == 0:
            remember(s, t)
        s.kind_potential[t] += s.kind_distance[t] - level
    for i in range(s.size[SEEN]):
        h = s.seen[i]
        if s.distance[h] == level:
            break
        if s.group_potential[h] == 0:
            remember(s, n + h)
        s.group_potential[h] += s.distance[h] - level


def remember(s: StackState, place: int) -> None:
    """Record that the potential of a type (``place`` below N) or of a group (N + group) is not 0."""
    s.shifted[s.size[SHIFTED]] = place
    s.size[SHIFTED] += 1


def forget_potentials(s: StackState) -> None:
    """Reset all potentials to 0."""
    n = s.size[GROUPS]
    for i in range(s.size[SHIFTED]):
        place = s.shifted[i]
        if place < n:
            s.kind_potential[place] = 0
        else:
            s.group_potential[place - n] = 0
    s.size[SHIFTED] = 0


HELD, DEEPENED, MOVED, WIPED_OUT = 0, 1, 2, 3
"""Results: the layout remains valid; S changed and no type had to move; types were moved; a type has no host left."""


def start(s: StackState, orders: Numbers) -> None:
    """Initialise the layout: all groups alive, S = 1, ``orders`` as given."""
    n, r = s.size[GROUPS], s.size[REDUNDANCY]
    for i in range(n * r):
        s.orders[i] = orders[i]
    s.size[STACK] = 1
    s.size[SURVIVORS] = n
    for t in range(n):
        s.alive[t] = 1
        s.load[t] = 1
        s.cover[t] = 1
        s.living[t] = r
        s.owner[t] = s.hosts[t * r]
        for j in range(r):
            s.depth[t * r + j] = j
        s.reached[t] = 0


def lose(s: StackState, lost: Numbers) -> int:
    """Remove lost groups and find a new layout.

    Afterwards, ``s.seekers`` are the types that no survivor had in its first S positions, ascending, and ``s.moves``
    the types that have moved in a stack.

    Returns:
        HELD, DEEPENED or MOVED; or WIPED_OUT, and then nothing was changed.
    """
    s.size[MOVES] = 0
    s.size[SEEKERS] = 0
    if wipes_out(s, lost):
        return WIPED_OUT
    stack = s.size[STACK]
    take_out(s, lost)
    if s.size[SEEKERS] == 0:
        return HELD
    found = max(stack, -(-s.size[GROUPS] // s.size[SURVIVORS]))
    while not assign(s, found, NONE):
        found += 1
    s.size[STACK] = found
    cover(s, stack, found)
    arrange(s, s.changed, s.size[CHANGED], NONE)
    return MOVED if s.size[MOVES] else DEEPENED


def bring_back(s: StackState, group: int, order: Numbers) -> int:
    """Add a group with its initial stack ``order`` [r], and make S as small as possible.

    Returns:
        HELD, DEEPENED (S became smaller, and nothing moved) or MOVED.
    """
    n, r, stack = s.size[GROUPS], s.size[REDUNDANCY], s.size[STACK]
    s.size[MOVES] = 0
    s.size[SEEKERS] = 0
    s.alive[group] = 1
    s.reached[group] = 0
    s.size[SURVIVORS] += 1
    for j in range(r):
        s.orders[group * r + j] = order[j]
        s.depth[order[j] * r + j] = j
        s.living[order[j]] += 1
    for t in range(n):
        s.former[t] = s.owner[t]
    found = -(-n // s.size[SURVIVORS])
    while found < stack and not assign_all(s, found, group):
        found += 1
    s.size[STACK] = found
    for t in range(n):
        s.cover[t] = 0
        s.changed[t] = t
    cover(s, 0, found)
    if found == stack:
        restore_owners(s)
        return HELD
    arrange(s, s.changed, n, group)
    return MOVED if s.size[MOVES] else DEEPENED


def trial(s: StackState, orders: Numbers, losses: Numbers, one: Numbers, found: Numbers) -> None:
    """Run a trial: from the initial layout, remove the groups one by one until the wipe-out.

    Args:
        losses: all groups in the order in which they fail.
        found: receives the number of losses including the fatal one, the sum of S before each loss, and the number of
            losses before the fatal one after which survivors had to compute lost types in addition (patch compute).
    """
    start(s, orders)
    found[0], found[1], found[2] = 0, 0, 0
    for group in losses:
        found[0] += 1
        found[1] += s.size[STACK]
        one[0] = group
        if lose(s, one) == WIPED_OUT:
            return
        if s.size[SEEKERS] > 0:
            found[2] += 1


def wipes_out(s: StackState, lost: Numbers) -> bool:
    """Subtract the lost groups from ``s.living``; if a type then has no host left, undo this and return True."""
    r = s.size[REDUNDANCY]
    wiped = False
    for w in lost:
        for i in range(w * r, w * r + r):
            s.living[s.orders[i]] -= 1
            if s.living[s.orders[i]] == 0:
                wiped = True
    if wiped:
        for w in lost:
            for i in range(w * r, w * r + r):
                s.living[s.orders[i]] += 1
    return wiped


def missing(s: StackState, lost: Numbers) -> None:
    """List in ``s.seekers`` the types that only the groups ``lost`` have in their first S positions, ascending.

    This is SPARe's rule for patch computes: if these groups are lost during a step, the survivors have computed all
    other types of the step. Nothing but ``s.seekers`` is changed.
    """
    r, stack = s.size[REDUNDANCY], s.size[STACK]
    s.size[SEEKERS] = 0
    for w in lost:
        for i in range(w * r, w * r + stack):
            s.cover[s.orders[i]] -= 1
            if s.cover[s.orders[i]] == 0:
                add_seeker(s, s.orders[i])
    for w in lost:
        for i in range(w * r, w * r + stack):
            s.cover[s.orders[i]] += 1


def take_out(s: StackState, lost: Numbers) -> None:
    """Remove the lost groups from the layout.

    Each of their types gets a survivor as owner that has it in its first S positions. Types without such a survivor
    become seekers.
    """
    missing(s, lost)
    r, stack = s.size[REDUNDANCY], s.size[STACK]
    orphans = 0
    for w in lost:
        s.alive[w] = 0
        s.reached[w] = FOREVER
        s.load[w] = 0
        s.size[SURVIVORS] -= 1
        for i in range(w * r, w * r + stack):
            t = s.orders[i]
            s.cover[t] -= 1
            if s.owner[t] == w:
                s.owner[t] = NONE
                s.queue[orphans] = t
                orphans += 1
    sort(s.queue, orphans)
    for i in range(orphans):
        if s.cover[s.queue[i]] > 0:
            settle(s, s.queue[i], stack)


def add_seeker(s: StackState, t: int) -> None:
    """Insert type ``t`` into ``seekers``, which stay ascending."""
    i = s.size[SEEKERS]
    while i > 0 and s.seekers[i - 1] > t:
        s.seekers[i] = s.seekers[i - 1]
        i -= 1
    s.seekers[i] = t
    s.size[SEEKERS] += 1


def cover(s: StackState, first: int, end: int) -> None:
    """Count in ``s.cover`` the types that the survivors have at stack positions ``first`` to ``end`` - 1."""
    r = s.size[REDUNDANCY]
    for w in range(s.size[GROUPS]):
        if s.alive[w]:
            for i in range(w * r + first, w * r + end):
                s.cover[s.orders[i]] += 1


def restore_owners(s: StackState) -> None:
    """Set the owners back to ``s.former``, and compute the loads from them."""
    n = s.size[GROUPS]
    for w in range(n):
        s.load[w] = 0
    for t in range(n):
        s.owner[t] = s.former[t]
        s.load[s.owner[t]] += 1


def arrange(s: StackState, kinds: Numbers, count: int, free: int) -> None:
    """Move each of the first ``count`` types in ``kinds`` into the first S positions of its owner's stack.

    The type is exchanged with the deepest type in the first S positions that the group does not own. The moves are
    listed in ``s.moves`` by type; those in group ``free`` have no previous position.
    """
    n, r, stack = s.size[GROUPS], s.size[REDUNDANCY], s.size[STACK]
    sort(kinds, count)
    for k in range(count):
        t = kinds[k]
        h = s.owner[t]
        at = t * r + s.mark[(t - h) % n]
        come_from = s.depth[at]
        if come_from < stack:
            continue
        end = stack - 1
        while s.owner[s.orders[h * r + end]] == h:
            end -= 1
        other = s.orders[h * r + end]
        s.orders[h * r + end] = t
        s.orders[h * r + come_from] = other
        s.depth[at] = end
        s.depth[other * r + s.mark[(other - h) % n]] = come_from
        s.cover[t] += 1
        s.cover[other] -= 1
        m = 4 * s.size[MOVES]
        s.moves[m] = h
        s.moves[m + 1] = t
        s.moves[m + 2] = NONE if h == free else come_from
        s.moves[m + 3] = end
        s.size[MOVES] += 1


def sort(numbers: Numbers, count: int) -> None:
    """Sort the first ``count`` numbers in ascending order by insertion; they are few, or already sorted."""
    for i in range(1, count):
        number = numbers[i]
        k = i
        while k > 0 and numbers[k - 1] > number:
            numbers[k] = numbers[k - 1]
            k -= 1
        numbers[k] = number
