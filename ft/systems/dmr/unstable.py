"""Read and write the file of non-reproducible operators, which compute a different result each time on the same inputs.

Comparing two executions of such an operator is meaningless. ``ft dmr selftest --out`` writes their names to this file;
a run with ``--ft-dmr-unstable`` reads it and leaves these operators unverified.
"""

from pathlib import Path

from msgspec import Struct, ValidationError, convert
from msgspec.json import encode, format

from ft.base import bounded_json, files
from ft.base.errors import UserError

_VERSION = 1
_FIX = "write the file with ft dmr selftest --out"


class Unstable(Struct, frozen=True):
    """Contents of a file of non-reproducible operators: their names, and the version of torch and the device with which
    they were found."""

    operators: tuple[str, ...]
    torch: str = ""
    device: str = ""
    version: int = _VERSION


def write_unstable(path: Path, found: Unstable) -> None:
    """Write ``found`` to ``path``.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_bytes(format(encode(found), indent=1) + b"\n")
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
    try:
        found = convert(values, Unstable)
    except ValidationError as error:
        raise UserError(f'{path} has no list of names under "operators": {error}', _FIX) from error
    if found.version != _VERSION:
        raise UserError(f"{path} has version {found.version}, but only version {_VERSION} can be read", _FIX)
    return found
