"""Looks at several replicas at the same moment, when one of them takes a look by itself because a limit passes.

A replica is a full copy of the model; its control plane orders looks at its own workers only. The launcher of the
replica's first node asks the other replicas for one as well, with the file by which a person asks. The launcher that
runs the quorum server also stores what the operating system says of that process.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ft.faults.hang.look import SERVER
from ft.faults.hang.replicas import FOR_OTHERS
from ft.job.agent.looks import of_the_system
from ft.record import looks
from ft.record.run import replicas


def begun(before: Mapping[int, Any], now: Mapping[int, Any]) -> dict[int, str]:
    """Return the replicas that have begun a look, each with the reason, "" if somebody has asked for it.

    Args:
        before: replica -> field "look" of its status when it was last read; absent if it was not.
        now: replica -> the same field now.
    """
    found = {}
    for replica, look in now.items():
        is_look = isinstance(look, list) and len(look) == 2
        if is_look and replica in before and look != before[replica] and look[0]:
            found[replica] = str(look[1])
    return found


class Company:
    """Gets looks at the other replicas when one of this node takes a look. Used in a thread that may wait for storage.

    Args:
        run_dir: directory of the run.
        server: returns (name of the node, pid) of the quorum server's process; the pid is 0 if it has ended; None if it
            belongs on another node.
    """

    def __init__(self, run_dir: Path, server: Callable[[], tuple[str, int] | None]):
        self._run_dir, self._server = run_dir, server
        self._before: dict[int, Any] = {}

    def follow(self, now: Mapping[int, Any], leads: Collection[int]) -> None:
        """Ask the other replicas for a look for each that has begun by itself.

        Args:
            now: replica of this node -> field "look" of its status.
            leads: the replicas whose first node is this one.
        """
        found = begun(self._before, now)
        self._before = dict(now)
        for replica, why in found.items():
            if why and replica in leads:
                self._want(replica, why)
        if found and (server := self._server()) is not None:
            node, pid = server
            said = of_the_system(SERVER, f"process {pid}" if pid else "", node, pid or None)
            with contextlib.suppress(OSError):  # the diagnosis knows less; nothing else depends on it
                looks.note_server(self._run_dir, time.time(), said)

    def _want(self, replica: int, why: str) -> None:
        for other, folder in replicas(self._run_dir).items():
            if other == replica:
                continue
            with contextlib.suppress(OSError):
                looks.want(folder, f"{FOR_OTHERS}{replica}: {why}")
