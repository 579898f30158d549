"""The controller's work on flat arrays: incremental, and with the least movement that there is.

All of it is plain Python on sequences: lists where it is interpreted, NumPy arrays where numba has compiled it. Both do
the same in the same order, so that both make the same layout. It is one file because numba's cache looks at one file.

Every type has an owner: the surviving group that has to compute it, with the type among its first S. That is a flow
without cost. A loss leaves a few types without one; each finds one along a shortest path of types that change their
owner. A type costs 1 in a group that does not have it among its first S, else nothing. Shortest paths one after the
other, with lengths corrected by potentials, keep the whole at its least cost (successive shortest paths).
"""

from typing import Any, NamedTuple

NONE = -1
HELD, DEEPENED, MOVED, WIPED_OUT = 0, 1, 2, 3

Numbers = Any  # list[int] or an integer array


class State(NamedTuple):
    """N groups, redundancy r. The first part is the layout, the rest follows from it or is room to work in.

    ``orders[w r + p]``: the type of group w at position p. ``owner[t]``: the group that computes type t.
    ``alive[w]``: 1 or 0. ``size``: N, r, S, surviving groups, moves, types without an owner.
    ``hosts[t r + j]``: the group that holds type t at mark j. ``mark[d]``: the j with g_j = d mod N, NONE if no mark.
    ``depth[w r + j]``: position of type w + g_j in group w. ``load[w]``: types that w owns. ``cover[t]``: survivors
    with t among their first S. ``living[t]``: surviving hosts.
    """

    orders: Numbers
    owner: Numbers
    alive: Numbers
    size: Numbers
    hosts: Numbers
    mark: Numbers
    depth: Numbers
    load: Numbers
    cover: Numbers
    living: Numbers
    seekers: Numbers  # [N] types without an owner
    moves: Numbers  # [4 N] group, type, from, to
    former: Numbers  # [N] owner before this call, of those in changed
    changed: Numbers  # [N + 1] the number of types that changed, then the types
    kind_potential: Numbers  # [N]
    group_potential: Numbers  # [N]
    kind_distance: Numbers  # [N]
    distance: Numbers  # [N] of groups
    before: Numbers  # [N] the type from which a group was reached
    queue: Numbers  # [N] types
    later: Numbers  # [N r] groups that are further away
    stamp: Numbers  # [N + 1] the search in which each group was reached for good; last, the present one
    tentative: Numbers  # [N] the search in which ``distance`` was set
    marked: Numbers  # [N] whether a type is in changed


GROUPS, REDUNDANCY, STACK, SURVIVORS, MOVES, SEEKERS = range(6)


def start(s: State, orders: Numbers, depth: Numbers) -> None:
    """The layout of the start: all groups alive, S = 1, ``orders`` and ``depth`` as given."""
    n, r = s.size[GROUPS], s.size[REDUNDANCY]
    s.orders[:] = orders
    s.depth[:] = depth
    s.size[STACK] = 1
    s.size[SURVIVORS] = n
    for t in range(n):
        s.alive[t] = 1
        s.load[t] = 1
        s.cover[t] = 1
        s.living[t] = r
        s.owner[t] = s.hosts[t * r]


def lose(s: State, lost: Numbers) -> int:
    """Takes groups out. ``seekers`` are then the types that nobody has computed, ascending, ``moves`` what moved.

    Returns:
        HELD, DEEPENED, MOVED; or WIPED_OUT, and nothing has changed.
    """
    r, stack = s.size[REDUNDANCY], s.size[STACK]
    s.size[MOVES] = 0
    s.size[SEEKERS] = 0
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
        return WIPED_OUT
    for w in lost:
        s.alive[w] = 0
        s.size[SURVIVORS] -= 1
        for i in range(w * r, w * r + stack):
            s.cover[s.orders[i]] -= 1
    for w in lost:
        s.load[w] = 0
        for i in range(w * r, w * r + stack):
            t = s.orders[i]
            if s.owner[t] == w:
                s.owner[t] = NONE
                if not settle(s, t, stack):
                    add_seeker(s, t)
    if s.size[SEEKERS] == 0:
        return HELD
    least = -(-s.size[GROUPS] // s.size[SURVIVORS])
    found = max(stack, least)
    while not assign(s, found, NONE):
        found += 1
    for w in range(s.size[GROUPS]):
        if s.alive[w]:
            for i in range(w * r + stack, w * r + found):
                s.cover[s.orders[i]] += 1
    s.size[STACK] = found
    for i in range(1, s.changed[0] + 1):
        s.queue[i - 1] = s.changed[i]
    arrange(s, s.queue, s.changed[0], NONE)
    return MOVED if s.size[MOVES] else DEEPENED


def bring_back(s: State, group: int, order: Numbers, depth: Numbers) -> int:
    """Takes a group in, with the given order and depth [r], and lets S fall as far as it goes.

    Returns:
        HELD, DEEPENED (S fell, and nothing moved) or MOVED.
    """
    n, r, stack = s.size[GROUPS], s.size[REDUNDANCY], s.size[STACK]
    s.size[MOVES] = 0
    s.size[SEEKERS] = 0
    s.alive[group] = 1
    s.size[SURVIVORS] += 1
    for j in range(r):
        s.orders[group * r + j] = order[j]
        s.depth[group * r + j] = depth[j]
        s.living[order[j]] += 1
    for t in range(n):
        s.former[t] = s.owner[t]
    found = -(-n // s.size[SURVIVORS])
    while found < stack and not assign_all(s, found, group):
        found += 1
    if found == stack:
        for t in range(n):
            s.owner[t] = s.former[t]
        count_loads(s)
        for j in range(stack):
            s.cover[order[j]] += 1
        return HELD
    s.size[STACK] = found
    for t in range(n):
        s.cover[t] = 0
        s.queue[t] = t
    for w in range(n):
        if s.alive[w]:
            for i in range(w * r, w * r + found):
                s.cover[s.orders[i]] += 1
    arrange(s, s.queue, n, group)
    return MOVED if s.size[MOVES] else DEEPENED


def trial(s: State, orders: Numbers, depth: Numbers, losses: Numbers, one: Numbers, found: Numbers) -> None:
    """From the start, loses the groups one by one up to the wipe-out.

    Args:
        orders, depth: as in ``start``. losses: all groups in the order in which they fail. one: room for one number.
        found: receives the number of losses with the fatal one, the sum of S before each, and the losses before the
            fatal one that needed a patch compute.
    """
    start(s, orders, depth)
    found[0], found[1], found[2] = 0, 0, 0
    for group in losses:
        found[0] += 1
        found[1] += s.size[STACK]
        one[0] = group
        if lose(s, one) == WIPED_OUT:
            return
        if s.size[SEEKERS] > 0:
            found[2] += 1


def settle(s: State, t: int, stack: int) -> bool:
    """Gives type t to its first surviving host that has it among its first ``stack``; False if none has."""
    r = s.size[REDUNDANCY]
    for j in range(r):
        h = s.hosts[t * r + j]
        if s.alive[h] and s.depth[h * r + j] < stack:
            s.owner[t] = h
            s.load[h] += 1
            return True
    return False


def add_seeker(s: State, t: int) -> None:
    """Keeps ``seekers`` ascending."""
    i = s.size[SEEKERS]
    while i > 0 and s.seekers[i - 1] > t:
        s.seekers[i] = s.seekers[i - 1]
        i -= 1
    s.seekers[i] = t
    s.size[SEEKERS] += 1


def count_loads(s: State) -> None:
    n = s.size[GROUPS]
    for w in range(n):
        s.load[w] = 0
    for t in range(n):
        if s.owner[t] != NONE:
            s.load[s.owner[t]] += 1


def assign(s: State, stack: int, free: int) -> bool:
    """Finds an owner for each of ``seekers`` with S = ``stack``; False where there is none, and nothing has changed.

    ``changed`` are then the types whose owner is another one. No position in group ``free`` costs anything.
    """
    s.changed[0] = 0
    count = s.size[SEEKERS]
    possible = True
    for i in range(count):
        note(s, s.seekers[i])
        settle(s, s.seekers[i], stack)
    for i in range(count):
        if possible and s.owner[s.seekers[i]] == NONE:
            possible = augment(s, s.seekers[i], stack, free)
    for i in range(1, s.changed[0] + 1):
        t = s.changed[i]
        s.marked[t] = 0
        if not possible:
            if s.owner[t] != NONE:
                s.load[s.owner[t]] -= 1
            s.owner[t] = s.former[t]
            if s.owner[t] != NONE:
                s.load[s.owner[t]] += 1
    if count > 1:
        for i in range(s.size[GROUPS]):
            s.kind_potential[i] = 0
            s.group_potential[i] = 0
    return possible


def assign_all(s: State, stack: int, free: int) -> bool:
    """As ``assign``, for all types anew; ``owner`` and ``load`` are spoilt where it fails, ``former`` is kept."""
    n = s.size[GROUPS]
    for w in range(n):
        s.load[w] = 0
        s.owner[w] = NONE
    s.size[SEEKERS] = 0
    s.changed[0] = 0
    for t in range(n):
        s.marked[t] = 1  # no note is taken
        settle(s, t, stack)
    possible = True
    for t in range(n):
        if possible and s.owner[t] == NONE:
            possible = augment(s, t, stack, free)
    for t in range(n):
        s.marked[t] = 0
        s.kind_potential[t] = 0
        s.group_potential[t] = 0
    return possible


def note(s: State, t: int) -> None:
    """Remembers a type's owner before it changes."""
    if not s.marked[t]:
        s.marked[t] = 1
        s.former[t] = s.owner[t]
        s.changed[0] += 1
        s.changed[s.changed[0]] = t


def augment(s: State, root: int, stack: int, free: int) -> bool:
    """Finds an owner for type ``root`` along a shortest path; False, and nothing has changed, where there is none."""
    n, r = s.size[GROUPS], s.size[REDUNDANCY]
    s.stamp[n] += 1
    search = s.stamp[n]
    s.queue[0] = root
    s.kind_distance[root] = 0
    head, tail, later, level = 0, 1, 0, 0
    end = NONE
    while end == NONE:
        while head < tail and end == NONE:
            t = s.queue[head]
            head += 1
            for j in range(r):
                h = s.hosts[t * r + j]
                if not s.alive[h] or s.stamp[h] == search or s.owner[t] == h:
                    continue
                far = level + s.kind_potential[t] - s.group_potential[h]
                if s.depth[h * r + j] >= stack and h != free:
                    far += 1
                if far > level:
                    if s.tentative[h] != search or far < s.distance[h]:
                        s.tentative[h] = search
                        s.distance[h] = far
                        s.before[h] = t
                        s.later[later] = h
                        later += 1
                    continue
                s.distance[h] = level
                s.before[h] = t
                tail = reach(s, h, stack, search, tail)
                if s.load[h] < stack:
                    end = h
                    break
        if end != NONE:
            break
        level = nearest(s, later, search)
        if level == NONE:
            return False
        kept = 0
        for i in range(later):
            h = s.later[i]
            if s.stamp[h] == search:
                continue
            if s.distance[h] > level or end != NONE:
                s.later[kept] = h
                kept += 1
                continue
            tail = reach(s, h, stack, search, tail)
            if s.load[h] < stack:
                end = h
        later = kept
    if s.size[SEEKERS] != 1:
        shift(s, tail, level, search)
    hand_over(s, end)
    return True


def reach(s: State, h: int, stack: int, search: int, tail: int) -> int:
    """Marks a group as reached, and puts the types that it owns at the end of the queue; returns the new end."""
    r = s.size[REDUNDANCY]
    s.stamp[h] = search
    left = s.load[h]
    if left < stack:
        return tail  # the search ends here
    for i in range(h * r, h * r + r):
        if left == 0:
            break
        t = s.orders[i]
        if s.owner[t] == h:
            s.kind_distance[t] = s.distance[h]
            s.queue[tail] = t
            tail += 1
            left -= 1
    return tail


def nearest(s: State, later: int, search: int) -> int:
    """The least distance of a group in ``later`` that is not reached yet; NONE without any."""
    least = NONE
    for i in range(later):
        h = s.later[i]
        if s.stamp[h] != search and (least == NONE or s.distance[h] < least):
            least = s.distance[h]
    return least


def shift(s: State, tail: int, level: int, search: int) -> None:
    """Potentials for the next search: whatever was nearer than the end of this path comes closer to it."""
    for i in range(tail):
        t = s.queue[i]
        if s.kind_distance[t] < level:
            s.kind_potential[t] += s.kind_distance[t] - level
    for h in range(s.size[GROUPS]):
        if s.stamp[h] == search and s.distance[h] < level:
            s.group_potential[h] += s.distance[h] - level


def hand_over(s: State, end: int) -> None:
    """Every type on the path to group ``end`` goes one group further."""
    h = end
    while h != NONE:
        t = s.before[h]
        note(s, t)
        last = s.owner[t]
        s.owner[t] = h
        s.load[h] += 1
        if last != NONE:
            s.load[last] -= 1
        h = last


def arrange(s: State, kinds: Numbers, count: int, free: int) -> None:
    """Brings each of the first ``count`` of ``kinds`` among the first S of its owner, and lists the moves by type.

    A type that comes in takes the deepest position of the first S whose type this group does not own, which goes where
    the other one was.
    """
    n, r, stack = s.size[GROUPS], s.size[REDUNDANCY], s.size[STACK]
    sort(kinds, count)
    for k in range(count):
        t = kinds[k]
        h = s.owner[t]
        j = s.mark[(t - h) % n]
        here = s.depth[h * r + j]
        if here < stack:
            continue
        there = stack - 1
        while s.owner[s.orders[h * r + there]] == h:
            there -= 1
        other = s.orders[h * r + there]
        s.orders[h * r + there] = t
        s.orders[h * r + here] = other
        s.depth[h * r + j] = there
        s.depth[h * r + s.mark[(other - h) % n]] = here
        s.cover[t] += 1
        s.cover[other] -= 1
        m = 4 * s.size[MOVES]
        s.moves[m] = h
        s.moves[m + 1] = t
        s.moves[m + 2] = NONE if h == free else here
        s.moves[m + 3] = there
        s.size[MOVES] += 1


def sort(numbers: Numbers, count: int) -> None:
    """The first ``count`` ascending; they are few, or sorted already."""
    for i in range(1, count):
        number = numbers[i]
        k = i
        while k > 0 and numbers[k - 1] > number:
            numbers[k] = numbers[k - 1]
            k -= 1
        numbers[k] = number
