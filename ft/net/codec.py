"""Converts dataclasses to JSON values and back, by their type hints. The processes of a run encode their messages with
it.

Reading is strict: a value of another type than its field's, an unknown field and a missing field are errors, whose
message names the place of the problem in the value and what was expected there. The function that reads a type is built
once.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache
from typing import Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from ft.base.errors import FtError

_SCALARS = frozenset({int, float, str, bool})
_Reader = Callable[[Any], Any]
_SHORT = 8
"""Up to this length, numbers are encoded one by one."""
_MOST_NUMBERS = 1 << 20
"""Maximum length of a list that is decoded from runs, because a few bytes could otherwise ask for all of the memory."""


class BadMessage(FtError):
    """A received value does not match its type.

    Args:
        path: names of fields, keys and indices that lead to the wrong part, from the outside to the inside.
    """

    def __init__(self, problem: str, path: tuple[str, ...] = ()):
        super().__init__(f"{'.'.join(path)}: {problem}" if path else problem)
        self.problem, self.path = problem, path

    def below(self, name: str) -> "BadMessage":
        """Return the same error for the value that contains the present one as its part ``name``."""
        return BadMessage(self.problem, (name, *self.path))


class Numbers(list[int]):
    """Whole numbers that are encoded by their runs of equal distances, such as the members of a process group.

    The encoding is ``{"runs": [[first number, distance, count], ...]}``, or the list itself if that is short. The same
    runs are decoded to the same object, which must not be changed.
    """

    def to_json(self) -> Any:
        """Return the JSON value that represents these numbers; ``from_json`` converts it back."""
        runs = _runs(self) if len(self) > _SHORT else []
        return {"runs": runs} if 0 < 4 * len(runs) < len(self) else list(self)

    @classmethod
    def from_json(cls, value: Any) -> "Numbers":
        """Convert a JSON value that ``to_json`` has returned back to the numbers.

        Raises:
            BadMessage: the value does not represent whole numbers, or it represents more than ``_MOST_NUMBERS``.
        """
        if isinstance(value, list | tuple):
            return cls(_reader(list[int])(value))
        if not isinstance(value, Mapping) or value.keys() != {"runs"}:
            raise _wrong(value, "a list of whole numbers, or runs of such")
        runs = tuple(_reader(list[tuple[int, int, int]])(value["runs"]))
        if any(count < 1 for _, _, count in runs) or sum(count for _, _, count in runs) > _MOST_NUMBERS:
            raise _wrong(value, f"runs of 1 to {_MOST_NUMBERS} numbers in all")
        return _expanded(runs)


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Split numbers into runs in which neighbours have equal distances.

    Returns:
        [first number, distance, count] of each run, in order.
    """
    runs, begin = [], 0
    while begin < len(numbers):
        end = begin + 1
        distance = numbers[end] - numbers[begin] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == distance:
            end += 1
        runs.append([numbers[begin], distance, end - begin])
        begin = end
    return runs


@lru_cache(maxsize=1024)
def _expanded(runs: tuple[tuple[int, int, int], ...]) -> Numbers:
    return Numbers(first + distance * at for first, distance, count in runs for at in range(count))


def to_json(value: Any) -> Any:
    """Convert dataclasses, lists, mappings and scalars to JSON values."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, Numbers):
        return value.to_json()
    if isinstance(value, list | tuple):
        return list(value) if all(type(item) in _SCALARS for item in value) else [to_json(item) for item in value]
    return value


def from_json(kind: Any, value: Any) -> Any:
    """Convert the result of ``to_json``, or what JSON has made of it, back to an object of type ``kind``.

    A dataclass may check its values in ``__post_init__`` and raise ValueError.

    Raises:
        BadMessage: the value does not match ``kind``.
    """
    return _reader(kind)(value)


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to 2**62 - 1."""
    return type(value) is int and 0 <= value < 1 << 62


@cache
def _reader(kind: Any) -> _Reader:
    """Return the function that reads a value of type ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda value: value
    if kind is float:
        return _read_number
    if kind is Numbers:
        return Numbers.from_json
    if kind in _SCALARS:
        return _typed({int: "a whole number", str: "a text", bool: "true or false"}[kind], kind)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin in (list, tuple):
        return _sequence(origin, arguments)
    if origin in (dict, Mapping):
        return _mapping(*arguments)
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind)
    raise TypeError(f"the codec cannot read {kind}")


def _typed(name: str, kind: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # isinstance would accept a bool for an int
            raise _wrong(value, name)
        return value

    return read


def _read_number(value: Any) -> Any:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(value, "a number")
    return value


def _union(arguments: Sequence[Any]) -> _Reader:
    options = [_reader(option) for option in arguments if option is not type(None)]

    def read(value: Any) -> Any:
        if value is None and len(options) < len(arguments):
            return None
        for option in options[:-1]:
            try:
                return option(value)
            except BadMessage:
                continue
        return options[-1](value)

    return read


def _sequence(origin: type, arguments: tuple[Any, ...]) -> _Reader:
    length = len(arguments) if origin is tuple and arguments[-1] is not Ellipsis else None
    readers = [_reader(argument) for argument in arguments if argument is not Ellipsis]
    scalar = arguments[0] if length is None and arguments[0] in (int, str, bool) else None

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _wrong(value, "a list")
        if length is not None and len(value) != length:
            raise _wrong(value, f"a list of {length}")
        if scalar is not None and all(type(item) is scalar for item in value):
            return origin(value)
        found = []
        for at, item in enumerate(value):
            try:
                found.append(readers[at if length is not None else 0](item))
            except BadMessage as error:
                raise error.below(str(at)) from None
        return origin(found)

    return read


def _mapping(key_kind: Any, kind: Any) -> _Reader:
    item_reader = _reader(kind)

    def read_key(key: Any) -> Any:
        if key_kind is int and isinstance(key, str) and key.removeprefix("-").isdecimal():
            return int(key)
        if type(key) is not key_kind:
            raise _wrong(key, "the name of a field" if key_kind is str else "a whole number as a key")
        return key

    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(value, "an object")
        found = {}
        for key, item in value.items():
            try:
                found[read_key(key)] = item_reader(item)
            except BadMessage as error:
                raise error.below(str(key)) from None
        return found

    return read


def _dataclass(kind: type) -> _Reader:
    hints, names = get_type_hints(kind), [field.name for field in fields(kind) if field.init]
    needed = {f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING}
    readers: dict[str, _Reader] = {}

    def read(value: Any) -> Any:
        if not readers:  # not earlier: a type may contain itself
            readers.update({name: _reader(hints[name]) for name in names})
        if not isinstance(value, Mapping):
            raise _wrong(value, f"an object with the fields of {kind.__name__}")
        if unknown := value.keys() - readers.keys():
            raise BadMessage(f"{kind.__name__} has no field {', '.join(map(repr, sorted(unknown, key=str)))}")
        if missing := needed - value.keys():
            raise BadMessage(f"{kind.__name__} needs {', '.join(map(repr, sorted(missing)))}")
        given = {}
        for name, item in value.items():
            try:
                given[name] = readers[name](item)
            except BadMessage as error:
                raise error.below(name) from None
        try:
            return kind(**given)
        except ValueError as error:
            raise BadMessage(f"{error}: {str(value)[:200]}") from error

    return read


def _wrong(value: Any, expected: str) -> BadMessage:
    return BadMessage(f"{str(value)[:100]!r} is not {expected}")
