"""Merged console of all replicas of the model: the training output of one replica, and the events and errors of all."""

import re
from collections.abc import Mapping
from pathlib import Path

from ft.job.agent.console import Console, Tail

_NEWS = re.compile(r"^ft: ?")


class MergedConsole:
    """Standard output and standard error of a launcher.

    Args:
        quiet: show only output of workers and errors.
        files: replica -> (file with its agent's standard output, file with its standard error).
    """

    def __init__(self, quiet: bool, files: Mapping[int, tuple[Path, Path]]):
        self._own = Console(quiet)
        self._followed: int | None = None
        self.say, self.complain, self.close = self._own.say, self._own.complain, self._own.close
        self.show(files)

    def show(self, files: Mapping[int, tuple[Path, Path]]) -> None:
        """Show these files of replicas from now on, instead of those so far."""
        self._said = {replica: Tail(out, None) for replica, (out, _) in files.items()}
        self._complained = {replica: Tail(err, None) for replica, (_, err) in files.items()}

    def follow(self, replica: int | None) -> None:
        """Show the workers' output of this replica from now on, and of no other."""
        self._followed = replica

    def poll(self, to_the_end: bool = False) -> None:
        """Show what was written since the last call. ``to_the_end``: also an incomplete last line."""
        self._own.poll()
        for replica, tail in self._said.items():
            for line in tail.take(to_the_end).splitlines(keepends=True):
                if _NEWS.match(line):
                    self.say(self._named(replica, line))
                elif replica == self._followed:
                    self._own.write(line)
        for replica, tail in self._complained.items():
            for line in tail.take(to_the_end).splitlines():
                self.complain(self._named(replica, line))

    @staticmethod
    def _named(replica: int, line: str) -> str:
        return f"replica {replica}: {_NEWS.sub('', line.rstrip())}"
