"""An owner for every type at the least cost: phases 1 and 2 as one search.

Every type has an owner: the surviving group that has to compute it, with the type among its first S. That is a flow
without cost. A loss leaves a few types without one; each finds one along a shortest path of types that change their
owner. A type costs 1 in a group that does not have it among its first S, else nothing. Shortest paths one after the
other, with lengths corrected by potentials, keep the whole at its least cost (successive shortest paths). Where a path
is missing S is too small: what was matched so far stays matchable, so no other choice would have left one.
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
    """Finds an owner for each of ``seekers`` with S = ``stack``; False where there is none, and nothing has changed.

    ``changed`` are then the types whose owner may be another one. No position in group ``free`` costs anything.
    """
    s.size[CHANGED] = 0
    count = s.size[SEEKERS]
    possible = True
    for i in range(count):
        note(s, s.seekers[i])
        if stack > s.size[STACK]:  # else nobody has it
            settle(s, s.seekers[i], stack)
    for i in range(count):
        if possible and s.owner[s.seekers[i]] == NONE:
            possible = augment(s, s.seekers[i], stack, free)
    for i in range(s.size[CHANGED]):
        t = s.changed[i]
        s.marked[t] = 0
        if not possible:
            hand(s, t, s.former[t])
    forget_potentials(s)
    return possible


def assign_all(s: State, stack: int, free: int) -> bool:
    """As ``assign``, for all types anew; ``owner`` and ``load`` are spoilt where it fails, ``former`` is kept."""
    n = s.size[GROUPS]
    for i in range(n):
        s.load[i] = 0
        s.owner[i] = NONE
        s.marked[i] = 1  # so that no note is taken
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
    """Gives type t to its first surviving host that has it among its first ``stack``; False if none has."""
    r = s.size[REDUNDANCY]
    for j in range(r):
        h = s.hosts[t * r + j]
        if s.alive[h] and s.depth[t * r + j] < stack:
            hand(s, t, h)
            return True
    return False


def hand(s: State, t: int, new: int) -> None:
    """Makes group ``new``, or NONE, the owner of type t."""
    old = s.owner[t]
    if old != NONE:
        s.load[old] -= 1
    s.owner[t] = new
    if new != NONE:
        s.load[new] += 1


def note(s: State, t: int) -> None:
    """Remembers a type's owner before it changes."""
    if not s.marked[t]:
        s.marked[t] = 1
        s.former[t] = s.owner[t]
        s.changed[s.size[CHANGED]] = t
        s.size[CHANGED] += 1


def augment(s: State, root: int, stack: int, free: int) -> bool:
    """Finds an owner for type ``root`` along a shortest path; False, and nothing has changed, where there is none.

    Distances are small whole numbers: each is worked off first in, first out, then the next one is looked up.
    """
    s.size[SEARCH] += 1
    s.size[LEVEL] = 0
    s.size[LATER] = 0
    s.size[SEEN] = 0
    s.size[TAIL] = 1
    s.queue[0] = root
    s.kind_distance[root] = 0
    head = 0
    end = NONE if free != NONE else next_door(s, root, stack)
    while end == NONE:
        if head < s.size[TAIL]:
            end = look_from(s, s.queue[head], stack, free)
            head += 1
        elif next_level(s):
            end = go_further(s, stack)
        else:
            return False
    if s.size[SEEKERS] != 1:  # with one alone, no other search comes after this one
        shift_potentials(s)
    while end != NONE:
        t = s.before[end]
        note(s, t)
        last = s.owner[t]
        hand(s, t, end)
        end = last
    return True


def next_door(s: State, root: int, stack: int) -> int:
    """The first host of a type without an owner that has room for it, or NONE.

    No path is shorter: no host has the type among its first ``stack``, and no potential is above 0. Most paths are so.
    """
    r = s.size[REDUNDANCY]
    for j in range(r):
        h = s.hosts[root * r + j]
        if s.load[h] < stack and s.alive[h]:
            s.before[h] = root
            s.size[LEVEL] = 1
            return h
    return NONE


def look_from(s: State, t: int, stack: int, free: int) -> int:
    """Looks at the hosts of type t; returns one with room for a type that is no further than t, or NONE."""
    r, level, search = s.size[REDUNDANCY], s.size[LEVEL], s.size[SEARCH]
    for j in range(r):
        h = s.hosts[t * r + j]
        if s.reached[h] >= search:  # so is the owner of t, through which t was found
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
    """Goes to the least distance in ``later``; False where all in it are reached."""
    least = NONE
    for i in range(s.size[LATER]):
        h = s.later[i]
        if s.reached[h] != s.size[SEARCH] and (least == NONE or s.distance[h] < least):
            least = s.distance[h]
    s.size[LEVEL] = least
    return least != NONE


def go_further(s: State, stack: int) -> int:
    """Reaches the groups in ``later`` that are at the present distance; returns one with room, or NONE."""
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
    """Marks a group as reached; True where it has room for a type, else its types go to the end of the queue."""
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
    """For the next search: whatever was nearer than the end of this one comes as much closer to it.

    Types and groups stand in the order of their distance.
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
    s.shifted[s.size[SHIFTED]] = place
    s.size[SHIFTED] += 1


def forget_potentials(s: State) -> None:
    n = s.size[GROUPS]
    for i in range(s.size[SHIFTED]):
        place = s.shifted[i]
        if place < n:
            s.kind_potential[place] = 0
        else:
            s.group_potential[place - n] = 0
    s.size[SHIFTED] = 0
