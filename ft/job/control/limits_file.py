"""The file of ``ft run --limits``, in which a user sets some of the timeouts of ``ft.job.control.timeouts``."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ft.base import quantities, structured_file
from ft.base.errors import Problems, UserError
from ft.job.control.timeouts import Timeouts

_NAMES = [entry.name for entry in fields(Timeouts)]


def timeouts_of(path: str | None, base: Mapping[str, float]) -> Timeouts:
    """Return the timeouts of a run: those of the file, then those of ``base``, then the defaults.

    Args:
        path: YAML, TOML or JSON file: name of a timeout -> a number of seconds, or a text such as "2m"; None: no file.
        base: timeouts, in seconds, that replace the defaults.

    Raises:
        UserError: the file cannot be read, a name or a value is wrong, or the timeouts do not fit each other.
    """
    values = {} if path is None else structured_file.read(path, "limits")
    if not isinstance(values, dict):
        raise UserError(f"limits {path} is not a table of timeouts by name", "write lines such as: stall_s: 20")
    problems, given = Problems(), {}
    for name, value in values.items():
        with problems:
            given[_known(path, name)] = _seconds(path, name, value)
    problems.refuse()
    try:
        return Timeouts(**{**base, **given}).check()
    except UserError as error:
        raise UserError.of([(f"limits {path}: {problem}", fix) for problem, fix in error.problems]) from error


def _known(path: str | None, name: Any) -> str:
    if name in _NAMES:
        return str(name)
    near = difflib.get_close_matches(str(name), _NAMES, n=3) or _NAMES
    raise UserError(f"limits {path}: there is no timeout {name}", f"did you mean {' or '.join(near)}?")


def _seconds(path: str | None, name: Any, value: Any) -> float:
    try:
        return quantities.seconds(value, bare=1.0)
    except ValueError as error:
        raise UserError(f"limits {path}: {name} {value!r}: {error}", "give seconds, or a text such as 2m") from error
