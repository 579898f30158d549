"""Checks that timeouts which build on each other expire in the right order."""

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from ft.base.errors import Problems


def check(table: Any, noun: str, order: Iterable[tuple[str, str]], may_be_zero: Collection[str] = ()) -> None:
    """Check a dataclass of timeouts in seconds.

    Args:
        order: (shorter, longer) pairs of field names. The shorter timeout must expire first: its expiry handles the
            failure before the longer timeout would react to the same failure.
        may_be_zero: names of timeouts that may be zero.

    Raises:
        UserError: values are not positive numbers, or the order does not hold; the message names all of them.
    """
    problems = Problems()
    for entry in fields(table):
        value = getattr(table, entry.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (value > 0 or (value == 0 and entry.name in may_be_zero)):
            problems.add([(f"{noun} {entry.name} is {value!r}", "give a positive number of seconds")])
    problems.refuse()
    for shorter, longer in order:
        if not getattr(table, shorter) < getattr(table, longer):
            problem = (
                f"{noun} {longer} = {getattr(table, longer):g} s is not longer than "
                f"{shorter} = {getattr(table, shorter):g} s, which must expire first"
            )
            problems.add([(problem, f"make {longer} longer or {shorter} shorter")])
    problems.refuse()
