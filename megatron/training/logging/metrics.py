"""The metrics file: a JSON object per step, in the order of the steps."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.base.lines import Lines


class MetricsFile:
    """Appends to ``path``, after removing the steps after ``first_step`` and a line torn by a crash.

    A full disk does not stop training: lines that cannot be written wait in memory until there is space
    (``ft.base.lines``).

    Args:
        path: the file.
        first_step: number of steps done before.
        tell: function that prints messages about waiting lines; None: print them to standard error.

    Raises:
        UserError: the file cannot be created.
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
        """Append a step's line. ``figures``: JSON values, with "step" among them."""
        self._drop_undone()
        self._lines.write((json.dumps(figures) + "\n").encode())

    def rewind(self, step: int) -> None:
        """Mark the lines of steps after ``step`` as undone. They are removed when the first of these steps is repeated.

        They are not removed before, because a failure until then may end in a restart from a checkpoint of one of these
        steps.
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
        """Remove the steps after ``step``: atomically by a new file or, if the disk is full, by truncation."""
        kept = [line for line in self._path.read_bytes().splitlines(keepends=True) if _is_kept(line, step)]
        temporary = self._path.with_name(self._path.name + ".tmp")
        try:
            temporary.write_bytes(b"".join(kept))
            temporary.replace(self._path)
        except OSError:
            temporary.unlink(missing_ok=True)
            os.truncate(self._path, sum(map(len, kept)))  # steps are in order, so the kept lines come first


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False
