"""Logs each step of the trainer of a Megatron-LM checkout as one line of ``metrics.jsonl`` in the folder of the run."""

import time
from pathlib import Path
from typing import Any

from ft.record.metrics import MetricsFile


class Log:
    """Collects the values of a step, and writes them when the step is committed.

    Args:
        path: the metrics file; None on ranks that do not write it.
        first_step: number of steps that are done already; lines of later steps in an existing file are removed.
    """

    def __init__(self, path: Path | None, first_step: int):
        self._file = None if path is None else MetricsFile(path, first_step)
        self._figures: dict[str, Any] = {}
        self._since = time.perf_counter()

    @property
    def writes(self) -> bool:
        """Return whether this rank writes the metrics file."""
        return self._file is not None

    def add(self, **figures: Any) -> None:
        """Add values of the current step. Values that are None are left out."""
        self._figures |= {name: value for name, value in figures.items() if value is not None}

    def commit(self, step: int, tokens: int) -> None:
        """Write the line of ``step``, which has used ``tokens`` tokens."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        figures, self._figures = self._figures, {}
        if self._file is not None:
            speed = {"step_time_s": seconds, "tokens_per_s": tokens / seconds}
            self._file.write({"step": step, **figures, **speed, "wall": round(time.time(), 3)})

    def rewind(self, step: int) -> None:
        """Go back to ``step``, from which training is repeated."""
        self._figures, self._since = {}, time.perf_counter()
        if self._file is not None:
            self._file.rewind(step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
