"""Find an owner for every shard type at the least cost: SPARe, algorithm 2, phases 1 and 2, as one incremental search.

In SPARe, each group (replica of the model) hosts several shard types (parts of a global batch) in an order, its stack,
and computes the first S of them in every step. The owner of a type is the surviving group that has to compute it; a
group owns at most S types. This is a matching of types to groups, that is, a minimum-cost flow: a type costs 1 in a
group that does not have it in its first S positions (there it has to move), else 0.

After a loss, a few types (the seekers) have no owner. Each of them gets one along a shortest augmenting path, on which
other types change their owner. Successive shortest paths, with lengths corrected by node potentials, keep the total
cost minimal. If there is no augmenting path, no complete matching exists, so S is too small.

``h`` and ``t`` are the numbers of a group (host) and of a type. The functions work in place on the flat sequences of
:class:`ft.systems.spare.controller.state.State`, so that numba can compile them.
"""

from ft.systems.spare.controller.state import (
    CHANGED,
    GROUPS,
    LATER,
    LEVEL,
    NONE,
    REDUNDANCY,
    SEARCH,
    SEEKERS,
    SEEN,
    SHIFTED,
    STACK,
    TAIL,
    State,
)


def assign(s: State, stack: int, free: int) -> bool:
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


def assign_all(s: State, stack: int, free: int) -> bool:
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


def settle(s: State, t: int, stack: int) -> bool:
    """Assign type t to the first surviving host that has it in its first ``stack`` positions; False if none has it."""
    r = s.size[REDUNDANCY]
    for j in range(r):
        h = s.hosts[t * r + j]
        if s.alive[h] and s.depth[t * r + j] < stack:
            set_owner(s, t, h)
            return True
    return False


def set_owner(s: State, t: int, new: int) -> None:
    """Make group ``new``, or NONE, the owner of type t."""
    old = s.owner[t]
    if old != NONE:
        s.load[old] -= 1
    s.owner[t] = new
    if new != NONE:
        s.load[new] += 1


def note(s: State, t: int) -> None:
    """Record the owner of a type before it changes."""
    if not s.marked[t]:
        s.marked[t] = 1
        s.former[t] = s.owner[t]
        s.changed[s.size[CHANGED]] = t
        s.size[CHANGED] += 1


def augment(s: State, root: int, stack: int, free: int) -> bool:
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


def free_host(s: State, root: int, stack: int) -> int:
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


def relax_hosts(s: State, t: int, stack: int, free: int) -> int:
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


def next_level(s: State) -> bool:
    """Set the current distance to the least one of the groups in ``s.later``; return False if all are reached."""
    least = NONE
    for i in range(s.size[LATER]):
        h = s.later[i]
        if s.reached[h] != s.size[SEARCH] and (least == NONE or s.distance[h] < least):
            least = s.distance[h]
    s.size[LEVEL] = least
    return least != NONE


def reach_hosts(s: State, stack: int) -> int:
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


def reach(s: State, h: int, stack: int) -> bool:
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


def shift_potentials(s: State) -> None:
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


def remember(s: State, place: int) -> None:
    """Record that the potential of a type (``place`` below N) or of a group (N + group) is not 0."""
    s.shifted[s.size[SHIFTED]] = place
    s.size[SHIFTED] += 1


def forget_potentials(s: State) -> None:
    """Reset all potentials to 0."""
    n = s.size[GROUPS]
    for i in range(s.size[SHIFTED]):
        place = s.shifted[i]
        if place < n:
            s.kind_potential[place] = 0
        else:
            s.group_potential[place - n] = 0
    s.size[SHIFTED] = 0
