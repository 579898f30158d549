"""One console for all replicas: the steps of one of them, and what befalls any."""

import re
from collections.abc import Mapping
from pathlib import Path

from ft.job.agent.console import Console, Tail

_NEWS = re.compile(r"^ft: ?")


class MergedConsole:
    """Standard output and error of a launcher.

    Args:
        quiet: only output of workers and errors. files: replica -> what its agent says, what it complains of.
    """

    def __init__(self, quiet: bool, files: Mapping[int, tuple[Path, Path]]):
        self._own = Console(quiet)
        self._said = {replica: Tail(out, None) for replica, (out, _) in files.items()}
        self._complained = {replica: Tail(err, None) for replica, (_, err) in files.items()}
        self._followed: int | None = None
        self.say, self.complain, self.close = self._own.say, self._own.complain, self._own.close

    def follow(self, replica: int | None) -> None:
        """From now on the workers' output of this replica is shown, and of no other."""
        self._followed = replica

    def poll(self, to_the_end: bool = False) -> None:
        """Shows what has come."""
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
