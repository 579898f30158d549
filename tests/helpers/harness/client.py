"""The fixture `ranks`: it starts ranks on the warm server, waits for them, and reports the first cause of a failure.

Every call has a deadline, and no process of the call outlives it: a test that leaves a process behind fails.
"""

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

from harness import processes
from harness.handle import Handle, Outcome, RankFailed
from harness.warm import Server


class Ranks:
    """The fixture ``ranks``: a call runs a function on N forked ranks and returns its values in rank order."""

    def __init__(self, make_folder: Callable[[], Path]):
        self._make_folder = make_folder
        self.server = Server(make_folder())
        self._open: list[Handle] = []
        self._last: Handle | None = None

    def __call__(self, function, world_size: int, *args, timeout: float = 180, init: bool = True, env=None, **kwargs):
        """Run ``function(*args, **kwargs)`` on every rank and wait.

        Args:
            function: a function at the top level of a test module (ranks import it by name).
            world_size: number of ranks, one process each.
            timeout: seconds after which all ranks are killed.
            init: whether to create a gloo process group over all ranks first. Without it the environment is as
                torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, a free MASTER_PORT), for code that creates its
                own process group.
            env: environment variables to set in addition to the test's; they are set after torch has been imported.

        Returns:
            the values, rank 0 first.

        Raises:
            RankFailed: see there; as with the other exceptions, no process is left.
            RanksHung: see there.
            RanksLeftBehind: see there.
        """
        __tracebackhide__ = True
        handle = self.start(function, world_size, *args, init=init, env=env, collective_timeout=timeout + 60, **kwargs)
        outcomes = handle.wait(timeout, stop_at_failure=True)
        failed = sorted((o for o in outcomes if o.exitcode), key=_who_was_first)
        if failed:
            raise RankFailed(_explain(failed, handle))
        return [outcome.value for outcome in outcomes]

    def start(self, function, world_size: int, *args, init=True, env=None, collective_timeout=120, **kwargs) -> Handle:
        """Start ranks as a call does, but return at once with a :class:`Handle` for killing ranks and for reading how
        they ended.

        `collective_timeout` is the process group's timeout in seconds.
        """
        if "<" in function.__qualname__:
            raise TypeError(f"{function.__qualname__} is not at the top level of a module: ranks import it by name")
        folder = self._make_folder()
        pids = self.server.start_ranks(
            {
                "function": (function.__module__, function.__qualname__, function.__code__.co_filename),
                "arguments": pickle.dumps((args, kwargs)),
                "world_size": world_size,
                "init": init,
                "collective_timeout": collective_timeout,
                "environ": dict(os.environ),
                "env": dict(env or {}),
                "folder": str(folder),
                "sys_path": list(sys.path),
            }
        )
        self._open = [handle for handle in self._open if not handle.closed]
        handle = Handle(self.server, pids, folder, lambda: self._pids_beside(handle))
        self._open.append(handle)
        self._last = handle
        return handle

    def output(self, rank: int) -> str:
        """Return what a rank of the latest call wrote to stdout and stderr."""
        return self._last.output(rank)

    def close_forgotten(self) -> None:
        """Close the handles that a test has left open."""
        for handle in self._open:
            handle.close()
        self._open.clear()

    def _pids_beside(self, handle: Handle) -> set[int]:
        roots = {pid for other in self._open if other is not handle and not other.closed for pid in other.pids}
        return roots | set(processes.members(roots, roots)) if roots else set()


def _who_was_first(outcome: Outcome) -> tuple:
    """Return a sort key that puts the cause first: a rank that died without raising explains the exceptions of others;
    of exceptions the earliest comes first; ranks that the harness stopped come last."""
    died = outcome.error is None and not outcome.stopped
    return (not died, outcome.stopped, outcome.failed_at, outcome.rank)


def _explain(failed: list[Outcome], handle: Handle) -> str:
    first, *others = failed
    text = [f"rank {first.rank} of {len(handle.pids)} failed first ({first.in_a_line()})"]
    if first.error:
        text.append(first.error.rstrip())
    text.append(f"--- output of rank {first.rank} ---\n{handle.tail(first.rank)}")
    text += [o.in_a_line() for o in others if not o.stopped]
    if stopped := [o.rank for o in others if o.stopped]:
        text.append(f"ranks stopped for it: {', '.join(map(str, stopped))}")
    return "\n".join(text)
