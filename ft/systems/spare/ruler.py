"""Find the ruler by which SPARe places shard types on groups, so that two types have at most one group in common.

In SPARe, N groups (replicas of the model) compute N shard types (parts of a global batch), and each group hosts r types
(r is the redundancy): group w hosts type (w + g) mod N for each mark g of a ruler with r marks. Two types share at most
one group exactly if all differences of two marks, in both directions, are distinct mod N. At least r (r - 1) + 1 groups
are necessary for this; 2 L + 1 groups are sufficient for a Golomb ruler of length L. For numbers in between, it depends
on the ruler.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from ft.base.errors import UserError
from ft.systems.spare.golomb import OPTIMAL
from ft.systems.spare.modular import bose, prime_power, ruzsa, singer

SEARCH_GROUPS = 150
"""Number of groups up to which a ruler is searched for if neither a table nor a construction provides one."""

BUILD_GROUPS = 20_000
"""Number of groups up to which rulers are constructed; beyond it, only the table of Golomb rulers is used."""

SEARCH_NODES = 20_000
"""Number of marks after which a search gives up. It is not a time limit, so the result is equal on every machine."""


def ruler(groups: int, redundancy: int) -> tuple[int, ...]:
    """Return a ruler with ``redundancy`` marks for ``groups`` groups.

    This is the shortest known Golomb ruler if it fits, else a ruler made for that number of groups.

    Raises:
        UserError: the redundancy is not in 2..groups, or no ruler is known; the message names the largest known
            redundancy.
    """
    check_size(groups, redundancy)
    if redundancy <= most_marks(groups):
        for marks in _known(groups, redundancy):
            if is_distinct(marks, groups):
                return marks
        longest = _longest(groups)
        if redundancy <= len(longest):
            return longest[:redundancy]
    raise UserError(
        f"redundancy {redundancy} cannot be placed on {groups} groups so that two types share at most one of them",
        _advice(groups, redundancy),
    )


def check(marks: Sequence[int], groups: int) -> tuple[int, ...]:
    """Return the marks as integers if they are a ruler for ``groups`` groups.

    Raises:
        UserError: a mark is not in 0..groups - 1, the first is not 0, or two differences are the same mod ``groups``.
    """
    marks = tuple(int(mark) for mark in marks)
    check_size(groups, len(marks))
    outside = next((mark for mark in marks if not 0 <= mark < groups), None)
    if outside is not None:
        raise UserError(f"mark {outside} of the ruler is not in 0 to {groups - 1}", "give marks below --groups")
    if marks[0] != 0:
        raise UserError(f"the ruler starts at {marks[0]}", "let it start at 0: only differences matter")
    seen: dict[int, tuple[int, int]] = {}
    for a in marks:
        for b in marks:
            if a == b:
                continue
            difference = (a - b) % groups
            if difference in seen:
                c, d = seen[difference]
                raise UserError(
                    f"the ruler's differences {a} - {b} and {c} - {d} are both {difference} mod {groups}: "
                    "two types would share two groups",
                    f"remove a mark, or let ft plan spare place --groups {groups} compute the ruler",
                )
            seen[difference] = (a, b)
    if len(set(marks)) < len(marks):
        raise UserError("a mark is in the ruler twice", "give each once")
    return marks


def is_distinct(marks: Sequence[int], groups: int) -> bool:
    """Return whether all differences of two marks, in both directions, are distinct mod ``groups``, and none is 0."""
    array = np.asarray(marks)
    differences = (array[:, None] - array)[~np.eye(len(array), dtype=bool)] % groups
    return bool(np.bincount(np.append(differences, 0)).max(initial=0) == 1)


def largest_redundancy(groups: int) -> int:
    """Return the largest number of marks of a known ruler for ``groups`` groups; 1 if there is no ruler (2 groups).

    Raises:
        UserError: there are fewer than 2 groups.
    """
    check_size(groups)
    return len(_longest(groups))


def most_marks(groups: int) -> int:
    """Return the largest r with r (r - 1) + 1 <= ``groups``; the differences of more marks cannot all be distinct."""
    return (1 + math.isqrt(4 * groups - 3)) // 2


@cache
def _longest(groups: int) -> tuple[int, ...]:
    for redundancy in range(most_marks(groups), 1, -1):
        for marks in (*_known(groups, redundancy), *_searched(groups, redundancy)):
            if is_distinct(marks, groups):
                return marks
    return (0,)


def _known(groups: int, redundancy: int) -> Iterator[tuple[int, ...]]:
    """Yield candidate rulers with ``redundancy`` marks, the optimal Golomb ruler first."""
    if redundancy in OPTIMAL:
        yield OPTIMAL[redundancy]
    if groups > BUILD_GROUPS:
        return
    if redundancy not in OPTIMAL:
        yield from _cut(redundancy, groups)
    for marks, modulus in _special(groups):
        if modulus == groups and len(marks) >= redundancy:
            yield marks[:redundancy]


def _special(groups: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the constructions whose modulus is exactly ``groups``, with the modulus."""
    root = math.isqrt(groups)
    for q in (root - 1, root, root + 1):
        if prime_power(q) is not None:
            if q * q + q + 1 == groups:
                yield singer(q), groups
            if q * q - 1 == groups:
                yield bose(q), groups
            if q * (q - 1) == groups and prime_power(q)[1] == 1:
                yield ruzsa(q), groups


def _cut(redundancy: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Yield the shortest pieces of Bose's and Ruzsa's rulers, for more marks than the table of Golomb rulers has."""
    if 3 * redundancy**2 > 2 * groups:
        return  # their length is at least 0.75 r^2; beyond half the number of groups they rarely fit
    for q in range(redundancy, redundancy + 12):
        factors = prime_power(q)
        if factors is None or factors[1] > 1:
            continue
        for marks, modulus in ((bose(q), q * q - 1), (ruzsa(q), q * (q - 1))):
            if len(marks) >= redundancy:
                piece = _shortest_piece(marks, modulus, redundancy)
                if piece[-1] < groups:
                    yield piece


@cache
def _shortest_piece(marks: tuple[int, ...], modulus: int, size: int) -> tuple[int, ...]:
    """Return the shortest sequence of ``size`` consecutive marks over all multiples of a modular ruler."""
    factors = np.array([factor for factor in range(1, modulus // 2 + 1) if math.gcd(factor, modulus) == 1])
    around = np.sort(factors[:, None] * np.array(marks) % modulus, axis=1)
    around = np.concatenate([around, around + modulus], axis=1)
    lengths = around[:, size - 1 : size - 1 + len(marks)] - around[:, : len(marks)]
    row, start = np.unravel_index(lengths.argmin(), lengths.shape)
    return tuple(int(mark - around[row, start]) for mark in around[row, start : start + size])


def _searched(groups: int, redundancy: int) -> list[tuple[int, ...]]:
    """Return at most one ruler, from a depth-first search that gives up after ``SEARCH_NODES`` marks."""
    if groups > SEARCH_GROUPS:
        return []
    left = SEARCH_NODES

    def extended(marks: list[int], used: int) -> list[int] | None:
        nonlocal left
        if len(marks) == redundancy:
            return marks
        for mark in range(marks[-1] + 1, groups):
            left -= 1
            if left < 0:
                return None
            new = 0
            for other in marks:
                new |= 1 << (mark - other) | 1 << (groups - mark + other)
            if not new & used and new.bit_count() == 2 * len(marks):
                found = extended([*marks, mark], used | new)
                if found is not None:
                    return found
        return None

    found = extended([0], 0)
    return [] if found is None else [tuple(found)]


def _advice(groups: int, redundancy: int) -> str:
    largest = largest_redundancy(groups)
    if largest < 2:
        return "give 3 groups or more"
    return f"the largest redundancy for which a ruler of {groups} groups is known is {largest}"


def check_size(groups: int, redundancy: int | None = None) -> None:
    """Check the number of groups and the redundancy.

    Raises:
        UserError: there are fewer than 2 groups, or the redundancy is not in 2..groups.
    """
    if groups < 2:
        raise UserError(f"with {groups} groups, no group survives the loss of one", "give 2 groups or more")
    if redundancy is not None and redundancy < 2:
        raise UserError(f"with redundancy {redundancy}, a lost type has no other host", "give 2 or more")
    if redundancy is not None and redundancy > groups:
        raise UserError(
            f"redundancy {redundancy} with {groups} groups: a type has at most one host in each group",
            f"give a redundancy of at most {groups}",
        )
