"""The metrics file: a JSON object per step, in the order of the steps."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.base.lines import Lines


class MetricsFile:
    """Appends to ``path``, after dropping the steps after ``first_step`` and a line torn by a crash.

    A disk that is full stops no training: what finds no room waits in memory until there is some (``ft.base.lines``).

    Args:
        tell: takes what is said about such lines; None: standard error gets it.

    Raises:
        UserError: the file cannot be made.
    """

    def __init__(self, path: Path, first_step: int, tell: Callable[[str], None] | None = None):
        self._path = path
        self._undone_after: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._cut(first_step)
            self._lines = Lines(path, tell=tell)
        except OSError as error:
            raise UserError(f"--metrics-file {path} cannot be written: {error}", "give a writable path") from error

    def write(self, figures: dict[str, Any]) -> None:
        """Adds a step's line; ``figures``: JSON values, "step" among them."""
        self._drop_undone()
        self._lines.write((json.dumps(figures) + "\n").encode())

    def rewind(self, step: int) -> None:
        """The steps after ``step`` are undone: what is there about them is dropped when the first is done anew.

        Not before: a failure on the way there may end in a restart from a checkpoint of one of them.
        """
        self._undone_after = step

    def close(self) -> None:
        self._drop_undone()
        self._lines.close()

    def _drop_undone(self) -> None:
        step, self._undone_after = self._undone_after, None
        if step is not None:
            self._lines.replace(lambda: self._cut(step), lambda line: _is_kept(line, step))

    def _cut(self, step: int) -> None:
        """A new file takes the old one's place, so that no crash loses any; without room it is cut in place."""
        kept = [line for line in self._path.read_bytes().splitlines(keepends=True) if _is_kept(line, step)]
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.write_bytes(b"".join(kept))
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            os.truncate(self._path, sum(map(len, kept)))  # steps come in order: what is kept comes first


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
