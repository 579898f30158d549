"""What the person at the terminal sees: the output of two workers, and what the agent has to say."""

import sys
from pathlib import Path

_HELD_BACK = 1 << 16


def last_lines(path: Path, count: int = 15) -> list[str]:
    """The last lines of a text file, none if it is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 15)))
            return file.read().decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []


class Console:
    """Standard output and error of the agent.

    Args:
        quiet: only output of workers and errors.
    """

    def __init__(self, quiet: bool):
        self._quiet = quiet
        self._tails: dict[Path, Tail] = {}

    def say(self, text: str) -> None:
        """News of the run."""
        if not self._quiet:
            self._write(sys.stdout, text)

    def show(self, text: str) -> None:
        """A picture of its own."""
        if not self._quiet:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def complain(self, text: str) -> None:
        """Something went wrong."""
        self._write(sys.stderr, text)

    def follow(self, logs: list[Path], fresh: bool) -> None:
        """From now on the output of these logs is shown, and that of no others.

        Args:
            fresh: from their beginning, not only what comes from now on.
        """
        self.poll(to_the_end=True)
        old = self._tails
        self._tails = {log: old.get(log) or Tail(log, 0 if fresh else None) for log in logs}

    def shows(self, log: Path) -> bool:
        return log in self._tails

    def poll(self, to_the_end: bool = False) -> None:
        """Shows what the logs have grown by, whole lines only unless it is ``to_the_end``."""
        for tail in self._tails.values():
            text = tail.take(to_the_end)
            if text:
                sys.stdout.write(text)
                sys.stdout.flush()

    def _write(self, stream, text: str) -> None:
        stream.write("".join(f"ft: {line}\n" for line in text.splitlines()))
        stream.flush()


class Tail:
    """Reads what a file grows by.

    Args:
        start: byte to begin at, None: its present end.
    """

    def __init__(self, path: Path, start: int | None):
        self._path = path
        self._position = start if start is not None else (path.stat().st_size if path.exists() else 0)

    def take(self, to_the_end: bool) -> str:
        """What has come since, up to the last end of a line (or of a progress bar's picture)."""
        try:
            if self._path.stat().st_size <= self._position:
                return ""
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return ""
        if not to_the_end and len(data) < _HELD_BACK:
            data = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        self._position += len(data)
        return data.decode(errors="replace")
