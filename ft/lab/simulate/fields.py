"""Keys of a scenario file and the flags of the same names: read, and checked, in one place."""

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import quantities
from ft.base.errors import UserError


@dataclass(frozen=True)
class Field:
    """A key of the scenario file, and the flag of the same name.

    Attributes:
        section: of the file. read: text or number -> value, ValueError where it is none. default: None: there is none.
        metavar, help: for the flag.
    """

    section: str
    read: Callable[[Any], Any]
    default: Any
    metavar: str
    help: str

    @property
    def about(self) -> str:
        """``help`` with the default."""
        shown = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return self.help if self.default is None else f"{self.help} (default: {shown})"


def duration(least: float) -> Callable[[Any], float]:
    """Reads a time with its unit. A number of a file (no text) is in seconds."""

    def read(value: Any) -> float:
        return quantities.seconds(value, least, bare=None if isinstance(value, str) else 1.0)

    return read


def one_of(names: Sequence[str]) -> Callable[[Any], str]:
    """Reads one of some names."""

    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"none of {', '.join(names)}")
        return value

    return read


def several(read: Callable[[Any], Any], what: str) -> Callable[[Any], tuple]:
    """Reads a list, or text with commas, of what ``read`` reads; each value once. ``what``: they are, for messages."""

    def read_all(value: Any) -> tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise ValueError(f"no list of {what}")
        return tuple(dict.fromkeys(read(part.strip() if isinstance(part, str) else part) for part in parts))

    return read_all


def read_file(path: str | Path, fields: Mapping[str, Field], others: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a scenario file by the names of ``fields``; a trace is looked for beside the file.

    Args:
        fields: by name, as in flags; "-" is "_" in files.
        others: sections whose tables come back as they are, by their names.

    Raises:
        UserError: it cannot be read, is no TOML, or holds a section or key that there is not.
    """
    try:
        text = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the scenario {path} cannot be read: {error}", "see examples/ for scenario files") from error
    sections: dict[str, list[str]] = {}
    for name, field in fields.items():
        sections.setdefault(field.section, []).append(name.replace("-", "_"))
    values = {}
    for section, entries in text.items():
        if section not in (*sections, *others) or not isinstance(entries, dict):
            there = ", ".join(f"[{name}]" for name in (*sections, *others))
            raise UserError(f"{path}: {section!r} is no section of a scenario", f"there are: {there}")
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
    """The values of flags by the names of ``fields``; those that were not given (None) are not there.

    Raises:
        UserError: a value cannot be.
    """
    said = {name: value for name, value in given.items() if value is not None}
    return {name: _read(fields[name], name, value, f"--{name} {value}") for name, value in said.items()}


def _read(field: Field, name: str, value: Any, said: str) -> Any:
    try:
        return field.read(value)
    except ValueError as error:
        raise UserError(f"{said}: {error}", f"{name}: {field.about}") from error


def add_flags(parser: argparse.ArgumentParser, fields: Mapping[str, Field], titles: Mapping[str, str]) -> None:
    """Adds a flag for each of ``fields``, in groups by section. ``titles``: of the sections."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in fields.items():
        if field.section not in groups:
            groups[field.section] = parser.add_argument_group(titles[field.section])
        # Read later, together with the file: one place says what is wrong with a value.
        groups[field.section].add_argument(f"--{name}", metavar=field.metavar, help=field.about.replace("%", "%%"))
