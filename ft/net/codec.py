"""Converts dataclasses, such as the messages of ``ft.job.messages``, to JSON values and back, by their type hints."""

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

_SCALARS = frozenset({int, float, str, bool})


def to_json(value: Any) -> Any:
    """Convert dataclasses, lists, mappings and scalars to JSON values."""
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Fast path for lists of ranks (members of process groups), which are most of the data in large runs.
        return list(value) if all(type(item) in _SCALARS for item in value) else [to_json(item) for item in value]
    return value


def from_json(kind: Any, value: Any) -> Any:
    """Convert the result of ``to_json`` back to an object of type ``kind``.

    Raises:
        TypeError: the structure of the value does not match ``kind``.
        KeyError: the structure of the value does not match ``kind``.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        options = [option for option in arguments if option is not type(None)]
        return from_json(options[0], value) if len(options) == 1 else value
    if origin is list:
        if arguments[0] in _SCALARS:
            return list(value)
        return [from_json(arguments[0], item) for item in value]
    if origin is dict:
        return {arguments[0](key): from_json(arguments[1], item) for key, item in value.items()}
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_json(hints[name], item) for name, item in value.items()})
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
