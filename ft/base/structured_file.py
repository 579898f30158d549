"""Reads files of values in YAML, TOML or JSON; the suffix of a file's name says which."""

import tomllib
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError


def read(path: str | Path, noun: str) -> Any:
    """Return the content of a file.

    Args:
        path: the file; any suffix but .yaml, .yml and .toml means JSON.
        noun: word for the file, for messages.

    Raises:
        UserError: the file cannot be read or parsed.
    """
    path = Path(path)
    name, parse = _FORMATS.get(path.suffix.lower(), ("JSON", bounded_json.loads))
    try:
        value = parse(files.read_text(path))
        bounded_json.check(value)
        return value
    except OSError as error:
        raise UserError(f"{noun} {path} cannot be read: {error}", "give a readable file") from error
    except (ValueError, RecursionError) as error:  # also raised for bytes that are not valid text
        fix = "correct the file; its format follows from the suffix: .yaml, .yml, .toml or .json"
        raise UserError(f"{noun} {path} is not {name}: {error}", fix) from error


def _read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


_FORMATS = {".toml": ("TOML", tomllib.loads), ".yaml": ("YAML", _read_yaml), ".yml": ("YAML", _read_yaml)}
