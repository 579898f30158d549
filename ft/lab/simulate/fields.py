"""Parse and validate the scenario files (TOML) of ``ft simulate``, and the command-line flags of the same names.

A scenario describes a cluster, its failures and a training run. Each simulation defines its keys as a table of
:class:`Field`; a flag overrides the key of the same name.
"""

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import files, quantities
from ft.base.errors import UserError


@dataclass(frozen=True)
class Field:
    """One key of a scenario file, and the command-line flag of the same name.

    Attributes:
        section: TOML section that the key belongs to.
        read: function that converts text or a number to the value; raises ValueError if the input is invalid.
        default: value that is used if neither the file nor a flag sets the key; None: there is no default.
        metavar: placeholder in the flag's help.
        help: help text of the flag.
    """

    section: str
    read: Callable[[Any], Any]
    default: Any
    metavar: str
    help: str

    @property
    def about(self) -> str:
        """Return ``help`` with the default appended."""
        shown = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return self.help if self.default is None else f"{self.help} (default: {shown})"


def duration(least: float) -> Callable[[Any], float]:
    """Return a reader that converts a time with a unit, such as "5 min", to seconds; the least valid value is ``least``
    seconds. A plain number in a file is in seconds.
    """

    def read(value: Any) -> float:
        return quantities.seconds(value, least, bare=None if isinstance(value, str) else 1.0)

    return read


def one_of(names: Sequence[str]) -> Callable[[Any], str]:
    """Return a reader that accepts only the given names."""

    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"none of {', '.join(names)}")
        return value

    return read


def several(read: Callable[[Any], Any], what: str) -> Callable[[Any], tuple]:
    """Return a reader for a list, or comma-separated text, of values that ``read`` accepts. Duplicates are dropped.

    Args:
        read: reader of one value.
        what: description of the values, for error messages.
    """

    def read_all(value: Any) -> tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise ValueError(f"not a list of {what}")
        return tuple(dict.fromkeys(read(part.strip() if isinstance(part, str) else part) for part in parts))

    return read_all


def read_file(path: str | Path, fields: Mapping[str, Field], others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values of a scenario file, keyed by the names of ``fields``.

    The value of the key ``trace``, a file of recorded failures, is relative to the directory of the scenario file.

    Args:
        path: path of the scenario file.
        fields: flag name -> field; a "-" in a flag name is a "_" in the file.
        others: names of further sections, whose tables are returned unparsed under the section's name.

    Raises:
        UserError: the file cannot be read, is not TOML, has an unknown section or key, or has an invalid value.
    """
    try:
        text = tomllib.loads(files.read_text(path))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"the scenario {path} cannot be read: {error}", "see examples/ for scenario files") from error
    sections: dict[str, list[str]] = {}
    for name, field in fields.items():
        sections.setdefault(field.section, []).append(name.replace("-", "_"))
    values = {}
    for section, entries in text.items():
        if section not in (*sections, *others) or not isinstance(entries, dict):
            there = ", ".join(f"[{name}]" for name in (*sections, *others))
            raise UserError(f"{path}: {section!r} is not a section of a scenario", f"there are: {there}")
        if section in others:
            values[section] = entries
            continue
        for key, value in entries.items():
            if key not in sections[section]:
                raise UserError(f"{path}: [{section}] has no {key!r}", f"it has: {', '.join(sections[section])}")
            name = key.replace("_", "-")
            values[name] = _read(fields[name], name, value, f"{path}: {key} = {value!r}")
    if "trace" in values:
        values["trace"] = str(Path(path).parent / values["trace"])
    return values


def read_flags(given: Mapping[str, str | None], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return flag name -> parsed value for the flags that the user has set. Flags that are None are left out.

    Raises:
        UserError: a value is invalid.
    """
    said = {name: value for name, value in given.items() if value is not None}
    return {name: _read(fields[name], name, value, f"--{name} {value}") for name, value in said.items()}


def _read(field: Field, name: str, value: Any, said: str) -> Any:
    try:
        return field.read(value)
    except ValueError as error:
        raise UserError(f"{said}: {error}", f"{name}: {field.about}") from error


def add_flags(parser: argparse.ArgumentParser, fields: Mapping[str, Field], titles: Mapping[str, str]) -> None:
    """Add one flag for each of ``fields``, grouped by section.

    Args:
        parser: the parser to extend.
        fields: flag name -> field.
        titles: section name -> title of its argument group.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in fields.items():
        if field.section not in groups:
            groups[field.section] = parser.add_argument_group(titles[field.section])
        # Flags are parsed later, together with the file, so that invalid values are reported in one place.
        groups[field.section].add_argument(f"--{name}", metavar=field.metavar, help=field.about.replace("%", "%%"))
