"""Constructions of modular rulers (by Singer, Bose and Ruzsa), by which SPARe places shard types on groups.

A modular ruler is a set of integers (marks) whose ordered differences are all distinct modulo a certain number. For a
number of groups equal to the modulus, it has more marks than a Golomb ruler that fits. The rulers are sorted and start
at 0. Every subset of a modular ruler is a modular ruler, too.
"""

from collections.abc import Iterator
from functools import cache
from itertools import count, product

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
