"""Reads JSON that comes from another process or from a file: bounded in size, in depth and in its numbers.

``json.loads`` alone lets a text end its reader: brackets that are nested deeply raise RecursionError here or in code
that walks through the values later, and 1e400 becomes an infinity, for which ``int`` raises OverflowError.
"""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

MOST_BYTES = 256 << 20
"""Maximum length of a text: in bytes, or in characters if it is a str."""
MOST_DEPTH = 64
"""Maximum depth to which lists and objects may be nested."""
MOST_VALUES = 1_000_000
"""Maximum number of values in a file that people write by hand."""
_LONG = re.compile("[0-9]{21}")
"""Matches whole numbers that need more than 64 bits. A text without a match needs no check of single numbers."""
_NESTED = (dict, list)


class BadJson(ValueError):
    """A value exceeds a bound."""


def loads(
    text: str | bytes | bytearray,
    *,
    non_finite: bool = False,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Return the value that ``text`` encodes.

    Args:
        text: the JSON; bytes are UTF-8.
        non_finite: whether NaN, Infinity and -Infinity are accepted, as Python writes them: a loss can be NaN. A number
            that is too large for a float is refused in any case.
        object_pairs_hook: function that makes an object of its (name, value) pairs; None: a dict.

    Raises:
        ValueError: the text is no JSON.
        BadJson: it is too long, is nested too deeply, or has a number that is too large.
    """
    if len(text) > MOST_BYTES:
        raise BadJson(f"{len(text)} bytes of JSON; at most {MOST_BYTES} are read")
    try:
        words = text if isinstance(text, str) else text.decode()
        value = _decoder(non_finite, object_pairs_hook, _LONG.search(words) is not None).decode(words)
    except RecursionError:
        raise _too_deep() from None
    if words.count("[") + words.count("{") > MOST_DEPTH:
        _check_depth(value)
    return value


def check(value: Any) -> None:
    """Check a value that another parser (of YAML, of TOML) has made: by the same bounds, and in its number of values.

    Raises:
        BadJson: it exceeds a bound. So do aliases of YAML that contain themselves, or that multiply.
    """
    count, depth, level = 0, 0, [value]
    while level:
        below: list[Any] = []
        for each in level:
            items = [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list) else None
            if items is None:
                _check_number(each)
                continue
            count += len(items)
            if count > MOST_VALUES:
                raise BadJson(f"there are more than {MOST_VALUES:,} values")
            if depth == MOST_DEPTH:
                raise _too_deep()
            below += items
        depth, level = depth + 1, below


def _check_number(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise BadJson(f"{value} is no finite number")
    if isinstance(value, int) and value.bit_length() > 64:
        raise BadJson("there is a whole number of more than 64 bits")


def _check_depth(value: Any, left: int = MOST_DEPTH) -> None:
    if not isinstance(value, _NESTED):
        return
    if not left:
        raise _too_deep()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _NESTED):
            _check_depth(item, left - 1)


def _too_deep() -> BadJson:
    return BadJson(f"lists and objects are nested more than {MOST_DEPTH} deep")


@cache
def _decoder(non_finite: bool, hook: Callable | None, has_long_numbers: bool) -> json.JSONDecoder:
    return json.JSONDecoder(
        parse_float=_number,
        parse_int=_whole if has_long_numbers else None,
        parse_constant=None if non_finite else _refuse,
        object_pairs_hook=hook,
    )


def _number(text: str) -> float:
    if math.isinf(found := float(text)):
        raise BadJson(f"the number {text[:40]} is too large")
    return found


def _whole(text: str) -> int:
    if _LONG.search(text):
        raise BadJson(f"the number {text[:40]} is too large")
    return int(text)


def _refuse(text: str) -> float:
    raise BadJson(f"{text} is no finite number")
