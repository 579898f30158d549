"""Checks a table of limits: what has to be noticed first runs out first."""

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any

from ft.base.errors import UserError


def check(table: Any, noun: str, ladder: Iterable[tuple[str, str]], may_be_zero: Collection[str] = ()) -> None:
    """Checks a dataclass of seconds.

    Args:
        noun: what one of them is called. ladder: (shorter, longer) names: what has to be noticed first, so that the
            longer one does not act on its consequences.

    Raises:
        UserError: one is no positive number, or not longer than those it waits for.
    """
    for entry in fields(table):
        value = getattr(table, entry.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (value > 0 or (value == 0 and entry.name in may_be_zero)):
            raise UserError(f"{noun} {entry.name} is {value!r}", "give a positive number of seconds")
    for shorter, longer in ladder:
        if not getattr(table, shorter) < getattr(table, longer):
            raise UserError(
                f"{noun} {longer} = {getattr(table, longer):g} s is not longer than "
                f"{shorter} = {getattr(table, shorter):g} s, which has to run out first",
                f"make {longer} longer or {shorter} shorter",
            )
