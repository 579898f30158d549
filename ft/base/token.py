"""The run's token: a shared secret that authenticates a process as a member of the run.

At the start of each connection both ends prove that they know it (``ft.net.handshake``). It never crosses the wire.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from ft.base import files
from ft.base.errors import UserError

VARIABLE = "FT_TOKEN"
_FILE = "token"
_PERIOD_S = 0.05
_LEAST = 16
"""Minimum number of characters of a token."""
_MOST_BYTES = 4096


def make(run_dir: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token: from the environment, from the run's directory, or a new one that is written there.

    Only the user can read the file. Agents without a shared directory need FT_TOKEN in their environment.

    Raises:
        OSError: the token cannot be written.
        UserError: the token is too short, or another user's.
    """
    if given := environment.get(VARIABLE):
        return _long_enough(given, VARIABLE)
    path = run_dir / _FILE
    draft = run_dir / f".{_FILE}.{secrets.token_hex(8)}"
    draft.touch(0o600)
    try:
        draft.write_text(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # atomic: the file appears complete, and only the first agent creates it
    finally:
        draft.unlink()
    return _read(path)


def check(environment: Mapping[str, str]) -> None:
    """Raise UserError if the environment has a token that could be guessed."""
    if given := environment.get(VARIABLE):
        _long_enough(given, VARIABLE)


def find(run_dir: Path, patience_s: float, environment: Mapping[str, str] = os.environ) -> str:
    """Return the token, once another agent has made it.

    Args:
        run_dir: directory of the run, which all nodes share.
        environment: environment variables; a token in them is taken instead of the one in the directory.

    Raises:
        UserError: no token appeared within ``patience_s`` seconds, or it is too short, or another user's.
    """
    if given := environment.get(VARIABLE):
        return _long_enough(given, VARIABLE)
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _read(run_dir / _FILE)
        if time.monotonic() > deadline:
            raise UserError(
                f"no token in {run_dir} within {patience_s:g} s: node 0 has not started, or uses another directory",
                f"start ft run on node 0 with the same --run-dir, or set {VARIABLE} to the same value on all nodes",
            )
        time.sleep(_PERIOD_S)


def _read(path: Path) -> str:
    try:
        with open(path, "rb", opener=files.open_no_link) as file:
            found, owner = file.read(_MOST_BYTES).decode(), os.fstat(file.fileno()).st_uid
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no token: {error}", f"remove it, or set {VARIABLE} on all nodes") from error
    if owner != os.geteuid():
        raise UserError(f"{path} belongs to the user {owner}", "choose a --run-dir of your own")
    return _long_enough(found, str(path))


def _long_enough(token: str, source: str) -> str:
    if len(token) < _LEAST:
        problem = f"the token in {source} has {len(token)} characters; with less than {_LEAST} it could be guessed"
        raise UserError(problem, "take 32 random bytes as hexadecimal digits, as of `openssl rand -hex 32`")
    return token
