"""A loss, a return, and a whole trial: the controller without its wrapping.

All of it is plain Python on sequences of integers, so that numba can compile it as it is. Compiled or not, it does the
same in the same order, and makes the same layout.
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


def start(s: State, orders: Numbers) -> None:
    """The layout of the start: all groups alive, S = 1, ``orders`` as given."""
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
    """Takes groups out. ``seekers`` are then the types that nobody has computed, ascending, ``moves`` what moved.

    Returns:
        HELD, DEEPENED, MOVED; or WIPED_OUT, and nothing has changed.
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
    """Takes a group in, with its order of the start [r], and lets S fall as far as it goes.

    Returns:
        HELD, DEEPENED (S fell, and nothing moved) or MOVED.
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
    """From the start, loses the groups one by one up to the wipe-out.

    Args:
        orders: as in ``start``. losses: all groups in the order in which they fail. one: room for one number.
        found: receives the number of losses with the fatal one, the sum of S before each, and the losses before the
            fatal one that needed a patch compute.
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
    """Takes the groups off ``living``; where that leaves a type without a host, puts them back and returns True."""
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


def take_out(s: State, lost: Numbers) -> None:
    """Removes the groups; types that others have among their first S get an owner there, the rest become seekers."""
    r, stack = s.size[REDUNDANCY], s.size[STACK]
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
                add_seeker(s, t)
    left = 0
    for i in range(s.size[SEEKERS]):
        t = s.seekers[i]
        if s.cover[t] == 0 or not settle(s, t, stack):
            s.seekers[left] = t
            left += 1
    s.size[SEEKERS] = left


def add_seeker(s: State, t: int) -> None:
    """Keeps ``seekers`` ascending."""
    i = s.size[SEEKERS]
    while i > 0 and s.seekers[i - 1] > t:
        s.seekers[i] = s.seekers[i - 1]
        i -= 1
    s.seekers[i] = t
    s.size[SEEKERS] += 1


def cover(s: State, first: int, end: int) -> None:
    """Counts what the survivors hold at the positions from ``first`` on, below ``end``."""
    r = s.size[REDUNDANCY]
    for w in range(s.size[GROUPS]):
        if s.alive[w]:
            for i in range(w * r + first, w * r + end):
                s.cover[s.orders[i]] += 1


def restore_owners(s: State) -> None:
    n = s.size[GROUPS]
    for w in range(n):
        s.load[w] = 0
    for t in range(n):
        s.owner[t] = s.former[t]
        s.load[s.owner[t]] += 1


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
    """Makes the first ``count`` ascend; they are few, or do so already."""
    for i in range(1, count):
        number = numbers[i]
        k = i
        while k > 0 and numbers[k - 1] > number:
            numbers[k] = numbers[k - 1]
            k -= 1
        numbers[k] = number
