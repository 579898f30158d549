"""The core of SPARe's reordering controller: the loss of groups, the return of a group, and a whole Monte Carlo trial.

In SPARe, each group (replica of the model) hosts r of N shard types (parts of a global batch) in an order, its stack,
and computes the first S of them in every step. The *layout* is S and the stacks of all groups, together with the owner
of each type: the surviving group that has to compute it.

The functions are plain Python on the flat sequences of integers of :class:`ft.systems.spare.controller.state.State`, so
that numba can compile them unchanged. Compiled or not, they produce the same layout.
"""

from ft.systems.spare.controller.search import assign, assign_all, settle
from ft.systems.spare.controller.state import (
    CHANGED,
    FOREVER,
    GROUPS,
    MOVES,
    NONE,
    REDUNDANCY,
    SEEKERS,
    STACK,
    SURVIVORS,
    Numbers,
    State,
)

HELD, DEEPENED, MOVED, WIPED_OUT = 0, 1, 2, 3
"""Results: the layout remains valid; S changed and no type had to move; types were moved; a type has no host left."""


def start(s: State, orders: Numbers) -> None:
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


def lose(s: State, lost: Numbers) -> int:
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


def bring_back(s: State, group: int, order: Numbers) -> int:
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


def trial(s: State, orders: Numbers, losses: Numbers, one: Numbers, found: Numbers) -> None:
    """Run a trial: from the initial layout, remove the groups one by one until the wipe-out.

    Args:
        s: the state, which is overwritten.
        orders: the initial stacks of all groups, [N r].
        losses: all groups in the order in which they fail.
        one: scratch space for one number.
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


def wipes_out(s: State, lost: Numbers) -> bool:
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


def missing(s: State, lost: Numbers) -> None:
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


def take_out(s: State, lost: Numbers) -> None:
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


def add_seeker(s: State, t: int) -> None:
    """Insert type ``t`` into ``seekers``, which stay ascending."""
    i = s.size[SEEKERS]
    while i > 0 and s.seekers[i - 1] > t:
        s.seekers[i] = s.seekers[i - 1]
        i -= 1
    s.seekers[i] = t
    s.size[SEEKERS] += 1


def cover(s: State, first: int, end: int) -> None:
    """Count in ``s.cover`` the types that the survivors have at stack positions ``first`` to ``end`` - 1."""
    r = s.size[REDUNDANCY]
    for w in range(s.size[GROUPS]):
        if s.alive[w]:
            for i in range(w * r + first, w * r + end):
                s.cover[s.orders[i]] += 1


def restore_owners(s: State) -> None:
    """Set the owners back to ``s.former``, and compute the loads from them."""
    n = s.size[GROUPS]
    for w in range(n):
        s.load[w] = 0
    for t in range(n):
        s.owner[t] = s.former[t]
        s.load[s.owner[t]] += 1


def arrange(s: State, kinds: Numbers, count: int, free: int) -> None:
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
