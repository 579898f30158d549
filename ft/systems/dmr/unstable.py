"""Read and write the file of non-reproducible operators, which compute a different result each time on the same inputs.

Comparing two executions of such an operator is meaningless. ``ft dmr selftest --out`` writes their names to this file;
a run with ``--ft-dmr-unstable`` reads it and leaves these operators unverified.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files
from ft.base.errors import UserError

_VERSION = 1
_FIX = "write the file with ft dmr selftest --out"


@dataclass(frozen=True)
class Unstable:
    """Contents of a file of non-reproducible operators: their names, and the version of torch and the device with which
    they were found."""

    operators: tuple[str, ...]
    torch: str
    device: str

    def values(self) -> dict[str, Any]:
        """Return the contents as JSON values."""
        return {"version": _VERSION, "torch": self.torch, "device": self.device, "operators": list(self.operators)}


def write_unstable(path: Path, found: Unstable) -> None:
    """Write ``found`` to ``path``.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(found.values(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "name a file in a folder that exists") from error


def read_unstable(path: Path) -> Unstable:
    """Read a file that ``write_unstable`` wrote.

    Raises:
        UserError: the file cannot be read, is not JSON, has no list of names, or has an unknown version.
    """
    try:
        values = bounded_json.loads(files.read(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", _FIX) from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", _FIX) from error
    operators = values.get("operators") if isinstance(values, dict) else None
    if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
        raise UserError(f'{path} has no list of names under "operators"', _FIX)
    if values.get("version") != _VERSION:
        raise UserError(f"{path} has version {values.get('version')!r}, but only version {_VERSION} can be read", _FIX)
    return Unstable(tuple(operators), str(values.get("torch", "")), str(values.get("device", "")))
