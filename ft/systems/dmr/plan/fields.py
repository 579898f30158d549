"""Read values from the JSON files of DMR (profiles and plans), which users may have edited: every value is checked, and
an error names the wrong field. Also write such files."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError

ABSENT = object()
"""The ``default`` argument of ``Fields`` that stands for "there is no default": the field is required."""

_LARGEST = 1e300
"""Upper limit of times and sizes. JSON itself does not limit whole numbers."""


class Fields:
    """One JSON object of a file, whose methods return the value of a field and check its type.

    Where ``default`` is given, it is returned if the field is absent or null. The methods that take
    ``name`` raise ``UserError`` if the field is absent and has no default, or if its value is of another type.

    Args:
        values: the JSON value that was read; UserError is raised if it is not an object.
        place: position in the file, for messages ("prof.json: ops[3]").
        fix: what the user can do about an error.
    """

    def __init__(self, values: Any, place: str, fix: str):
        self.place, self.fix = place, fix
        if not isinstance(values, dict):
            raise self.error("is not a JSON object")
        self.values = values

    def error(self, problem: str) -> UserError:
        """Return the error to raise: the problem, preceded by the place."""
        return UserError(f"{self.place} {problem}", self.fix)

    def take(self, name: str, default: Any = ABSENT) -> Any:
        """Return the value of the field without checking its type; ``default`` if the field is absent or null.

        Raises:
            UserError: the value is absent or null, and there is no default.
        """
        value = self.values.get(name)
        if value is not None:
            return value
        if default is ABSENT:
            raise self.error(f"has no {name!r}")
        return default

    def text(self, name: str, default: Any = ABSENT) -> Any:
        return self._typed(name, default, str, "a text")

    def flag(self, name: str, default: Any = ABSENT) -> Any:
        return self._typed(name, default, bool, "true or false")

    def count(self, name: str, default: Any = ABSENT, least: int = 0) -> Any:
        """Return the value of the field, a whole number that is at least ``least``.

        Args:
            name: name of the field.
            default: returned if the field is missing; by default, a missing field is an error.
            least: lower bound of the value.
        """
        value = self._typed(name, default, int, "a whole number")
        if value is not default and (isinstance(value, bool) or value < least):
            raise self.error(f"has {name} = {value!r}, which is not a whole number of at least {least}")
        return value

    def amount(self, name: str, default: Any = ABSENT) -> Any:
        """Return the value of the field as a float: a time or a size, finite and not negative."""
        value = self._typed(name, default, (int, float), "a number")
        if value is default:
            return value
        # A whole number may be too large to be converted to float.
        if isinstance(value, bool) or not 0 <= value <= _LARGEST:
            raise self.error(f"has {name} = {value!r}, which is not a time or size (finite and not negative)")
        return float(value)

    def texts(self, name: str, default: Any = ABSENT) -> tuple[str, ...]:
        """Return the value of the field, a list of strings."""
        found = self._typed(name, default, list, "a list")
        if not all(isinstance(each, str) for each in found):
            raise self.error(f"has values other than texts in {name!r}")
        return tuple(found)

    def objects(self, name: str, default: Any = ABSENT) -> list["Fields"]:
        """Return the value of the field, a list of objects."""
        found = self._typed(name, default, list, "a list")
        return [Fields(each, f"{self.place}: {name}[{i}]", self.fix) for i, each in enumerate(found)]

    def object(self, name: str, default: Any = ABSENT) -> "Fields":
        """Return the value of the field, an object."""
        return Fields(self.take(name, default), f"{self.place}: {name}", self.fix)

    def _typed(self, name: str, default: Any, kind: Any, said: str) -> Any:
        value = self.take(name, default)
        if value is not default and not isinstance(value, kind):
            raise self.error(f"has {name} = {value!r}, which is not {said}")
        return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its pairs; refuse duplicate names, of which Python's reader would keep only the last."""
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"an object has {twice!r} twice")
    return values


def read_object(path: Path, version: int, fix: str) -> Fields:
    """Return the object in a file, whose version must be ``version``.

    Args:
        path: a JSON file.
        version: the only version that is accepted.
        fix: what the user can do if the file cannot be used.

    Raises:
        UserError: the file cannot be read, is truncated, is not a JSON object, or has another version.
    """
    try:
        values = bounded_json.loads(files.read_text(path), object_pairs_hook=_once)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", fix) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error}", fix) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path} is not JSON, or is truncated: {error.msg} at {where}", fix) from error
    except ValueError as error:
        raise UserError(f"{path} cannot be understood: {error}", fix) from error
    found = Fields(values, str(path), fix)
    if found.count("version") != version:
        raise found.error(f"has version {found.take('version')}, but this version of the program reads {version}")
    return found


def write_object(path: Path, values: dict[str, Any]) -> None:
    """Write ``values`` as JSON to ``path`` atomically: a crash leaves no incomplete file there.

    Raises:
        UserError: the file cannot be written.
    """
    path = Path(path)
    try:
        files.replace(path, json.dumps(values, separators=(",", ":")) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}", "choose another path") from error
