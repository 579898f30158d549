"""Find the ruler by which SPARe places shard types on groups, so that two types have at most one group in common:
optimal Golomb rulers from a table, and modular rulers by the constructions of Singer, Bose and Ruzsa.

N groups compute N shard types, and each group hosts r types: group w hosts type (w + g) mod N for each mark g of a
ruler with r marks. Two types share at most one group exactly if all differences of two marks, in both directions, are
distinct mod N. At least r (r - 1) + 1 groups are necessary for this; 2 L + 1 groups are sufficient for a Golomb ruler
of length L. For numbers in between, it depends on the ruler.

A Golomb ruler is a set of integers (marks) whose pairwise differences are all distinct. A modular ruler is one whose
ordered differences are all distinct modulo a certain number. For a number of groups equal to the modulus, it has more
marks than a Golomb ruler that fits. The rulers are sorted and start at 0. Every subset of a modular ruler is a modular
ruler, too.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, product

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


Table = list[list[int]]
"""Results of a field's addition or multiplication: the element at [x][y] is that of x and y."""


@cache
def singer(q: int) -> tuple[int, ...]:
    """Return a perfect difference set: q + 1 marks mod q^2 + q + 1, for a prime power q.

    Its marks are the exponents of the powers of a generator of GF(q^3) over GF(q) that lie in one plane.
    """
    modulus = q * q + q + 1
    for powers in _generators(q, 3):
        plane = [i for i, power in zip(range(modulus), powers, strict=False) if power[2] == 0]
        if len(plane) == q + 1 and _distinct(plane, modulus):
            return _from_zero(plane)
    raise ValueError(f"{q} is no prime power")


@cache
def bose(q: int) -> tuple[int, ...]:
    """Return q marks mod q^2 - 1, for a prime power q: the exponents of those powers of a generator t of GF(q^2) that
    differ from t by a constant."""
    modulus = q * q - 1
    for powers in _generators(q, 2):
        line = [i for i, power in zip(range(modulus), powers, strict=False) if power[1] == 1]
        if len(line) == q and _distinct(line, modulus):
            return _from_zero(line)
    raise ValueError(f"{q} is no prime power")


@cache
def ruzsa(p: int) -> tuple[int, ...]:
    """Return p - 1 marks mod p (p - 1), for a prime p."""
    modulus = p * (p - 1)
    for root in range(1, p):
        marks = [(p * i + (p - 1) * pow(root, i, p)) % modulus for i in range(1, p)]
        if _distinct(marks, modulus):
            return _from_zero(sorted(marks))
    raise ValueError(f"{p} is no prime")


def prime_power(number: int) -> tuple[int, int] | None:
    """Return (p, k) if ``number`` is p^k with p prime and k >= 1, else None."""
    if number < 2:
        return None
    p = next(d for d in count(2) if number % d == 0 or d * d > number)
    p = p if number % p == 0 else number
    k = 0
    while number % p == 0:
        number //= p
        k += 1
    return (p, k) if number == 1 else None


def _generators(q: int, degree: int) -> Iterator[Iterator[tuple[int, ...]]]:
    """Yield, for each monic polynomial over GF(q), the powers of its root t as coefficients of 1, t, ..."""
    factors = prime_power(q)
    if factors is None:
        return
    plus, times = _field(*factors)
    for coefficients in product(range(q), repeat=degree):
        if coefficients[-1]:  # the constant coefficient changes fastest: with some values of it no root is a generator
            yield _powers(coefficients[::-1], plus, times)


def _powers(tail: tuple[int, ...], plus: Table, times: Table) -> Iterator[tuple[int, ...]]:
    """Yield powers until one is 1 again; for degree 3, where only planes matter, until one is in GF(q)."""
    power = (1,) + (0,) * (len(tail) - 1)
    one = power
    while True:
        yield power
        top = power[-1]  # t^degree = tail, so the coefficient of t^degree is replaced by top * tail
        power = tuple(plus[lower][times[top][here]] for lower, here in zip((0, *power[:-1]), tail, strict=True))
        if power == one or (len(tail) == 3 and not any(power[1:])):
            return


@cache
def _field(p: int, k: int) -> tuple[Table, Table]:
    """Return the tables of addition and multiplication in GF(p^k).

    An element of the field is represented by the number whose digits to base p are its coefficients.
    """
    q = p**k
    digits = [tuple(number // p**i % p for i in range(k)) for number in range(q)]
    plus = [[_number([(x + y) % p for x, y in zip(a, b, strict=True)], p) for b in digits] for a in digits]
    for tail in digits:
        times = [[_number(_product(a, b, tail, p), p) for b in digits] for a in digits]
        if all(0 not in row[1:] for row in times[1:]):
            return plus, times
    raise ValueError(f"no field of {p}^{k} elements")


def _product(a: tuple[int, ...], b: tuple[int, ...], tail: tuple[int, ...], p: int) -> list[int]:
    """Return a * b modulo x^k = tail and modulo p."""
    k = len(tail)
    found = [0] * (2 * k - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            found[i + j] += x * y
    for i in range(2 * k - 2, k - 1, -1):
        for j, c in enumerate(tail):
            found[i - k + j] += found[i] * c
    return [x % p for x in found[:k]]


def _number(digits: list[int], p: int) -> int:
    return sum(digit * p**i for i, digit in enumerate(digits))


def _distinct(marks: list[int], modulus: int) -> bool:
    differences = {(a - b) % modulus for a in marks for b in marks if a != b}
    return len(differences) == len(marks) * (len(marks) - 1)


def _from_zero(marks: list[int]) -> tuple[int, ...]:
    return tuple(mark - marks[0] for mark in marks)


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
