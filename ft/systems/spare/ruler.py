"""Find the ruler by which SPARe places shard types on groups, so that two types have at most one group in common.

N groups compute N shard types, and each group hosts r types: group w hosts type (w + g) mod N for each mark g of a
ruler with r marks. Two types share at most one group exactly if all differences of two marks, in both directions, are
distinct mod N. At least r (r - 1) + 1 groups are necessary for this; 2 L + 1 groups are sufficient for a Golomb ruler
of length L, whose differences are all distinct (SPARe, definition B.1). For numbers in between, it depends on the
ruler. The rulers are sorted and start at 0.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from ft.base.errors import UserError

OPTIMAL: dict[int, tuple[int, ...]] = {
    len(marks): marks
    for marks in (
        tuple(int(mark) for mark in line.split())
        for line in """\
0 1
0 1 3
0 1 4 6
0 1 4 9 11
0 1 4 10 12 17
0 1 4 10 18 23 25
0 1 4 9 15 22 32 34
0 1 5 12 25 27 35 41 44
0 1 6 10 23 26 34 41 53 55
0 1 4 13 28 33 47 54 64 70 72
0 2 6 24 29 40 43 55 68 75 76 85
0 2 5 25 37 43 59 70 85 89 98 99 106
0 4 6 20 35 52 59 77 78 86 89 99 122 127
0 4 20 30 57 59 62 76 100 111 123 136 144 145 151
0 1 4 11 26 32 56 68 76 115 117 134 150 163 168 177
0 5 7 17 52 56 67 80 81 100 122 138 159 165 168 191 199
0 2 10 22 53 56 82 83 89 98 130 148 153 167 188 192 205 216
0 1 6 25 32 72 100 108 120 130 153 169 187 190 204 231 233 242 246
0 1 8 11 68 77 94 116 121 156 158 179 194 208 212 228 240 253 259 283
0 2 24 56 77 82 83 95 129 144 179 186 195 255 265 285 293 296 310 329 333
0 1 9 14 43 70 106 122 124 128 159 179 204 223 253 263 270 291 330 341 353 356
0 3 7 17 61 66 91 99 114 159 171 199 200 226 235 246 277 316 329 348 350 366 372
0 9 33 37 38 97 122 129 140 142 152 191 205 208 252 278 286 326 332 353 368 384 403 425
0 12 29 39 72 91 146 157 160 161 166 191 207 214 258 290 316 354 372 394 396 431 459 467 480
0 1 33 83 104 110 124 163 185 200 203 249 251 258 314 318 343 356 386 430 440 456 464 475 487 492
0 3 15 41 66 95 97 106 142 152 220 221 225 242 295 330 338 354 382 388 402 415 486 504 523 546 553
0 3 15 41 66 95 97 106 142 152 220 221 225 242 295 330 338 354 382 388 402 415 486 504 523 546 553 585
""".splitlines()
    )
}
"""Optimal rulers by number of marks, from published tables (James B. Shearer's; distributed.net's from 24 marks on)."""


SEARCH_GROUPS = 150
"""Number of groups up to which a ruler is searched for if the table has none that fits."""

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
    if redundancy in OPTIMAL and is_distinct(OPTIMAL[redundancy], groups):
        return OPTIMAL[redundancy]
    longest = _longest(groups)
    if redundancy <= len(longest):
        return longest[:redundancy]
    raise UserError(
        f"redundancy {redundancy} cannot be placed on {groups} groups so that two types share at most one of them",
        f"the largest redundancy for which a ruler of {groups} groups is known is {len(longest)}"
        if len(longest) > 1
        else "give 3 groups or more",
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
        if redundancy in OPTIMAL and is_distinct(OPTIMAL[redundancy], groups):
            return OPTIMAL[redundancy]
        if groups <= SEARCH_GROUPS and (marks := _searched(groups, redundancy)) is not None:
            return marks
    return (0,)


def _searched(groups: int, redundancy: int) -> tuple[int, ...] | None:
    """Return a ruler from a depth-first search that gives up after ``SEARCH_NODES`` marks."""
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
    return None if found is None else tuple(found)


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
