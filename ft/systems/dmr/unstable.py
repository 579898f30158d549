"""The file of operators that compute another result each time on the same inputs: executing them twice tells nothing.

``ft dmr selftest --out`` writes their names, a run with ``--ft-dmr-unstable`` reads them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import UserError

_VERSION = 1
_FIX = "write the file with ft dmr selftest --out"


@dataclass(frozen=True)
class Unstable:
    """What a file of unstable operators says. ``torch``, ``device``: where they were found to be so."""

    operators: tuple[str, ...]
    torch: str
    device: str

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        return {"version": _VERSION, "torch": self.torch, "device": self.device, "operators": list(self.operators)}


def write_unstable(path: Path, found: Unstable) -> None:
    """Raises UserError where the file cannot be written."""
    try:
        path.write_text(json.dumps(found.values(), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", "name a file in a folder that exists") from error


def read_unstable(path: Path) -> Unstable:
    """Raises UserError where it is no such file."""
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", _FIX) from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}", _FIX) from error
    operators = values.get("operators") if isinstance(values, dict) else None
    if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
        raise UserError(f'{path} has no list of names under "operators"', _FIX)
    if values.get("version") != _VERSION:
        raise UserError(f"{path} is of version {values.get('version')!r}, and {_VERSION} is known", _FIX)
    return Unstable(tuple(operators), str(values.get("torch", "")), str(values.get("device", "")))
