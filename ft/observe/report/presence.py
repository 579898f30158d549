"""Decide whether a run that has not ended still has a live control plane.

The control plane is the process that directs recoveries. It holds a lease, a file in the run's folder that it renews
periodically; another node takes the lease over if the holder dies. A run's other files do not show whether the control
plane is alive, because they look the same after a SIGKILL.
"""

from pathlib import Path

from ft.platform import election, processes

GONE_S = 60.0
"""Seconds without any write after which a control plane on another host counts as lost. A successor on another node may
need up to half of that time to import its modules.
"""

_SUCCESSION_S, _RENEWAL_S = 5.0, 0.5
"""Seconds to watch the lease for a renewal. The first value suffices for another node to take the lease over. The
second suffices for one renewal, and is used in runs of a single node, where no other node can take the lease over.
"""


def gone(folder: Path, age: float | None, nodes: int, *, is_steady: bool = False) -> str:
    """Return why the run has no control plane any more, or "" while it has, or may have, one.

    Args:
        folder: the folder that holds the lease.
        age: seconds since the run last wrote anything, or None if it never did.
        nodes: number of nodes of the run.
        is_steady: whether a lease holder renews the lease without a pause from the moment it takes the lease over.
    """
    standing = election.read(folder)
    if standing is None:
        return ""
    lives = processes.lives(standing.launcher) if standing.launcher else None
    if lives or election.is_kept(folder, _RENEWAL_S if nodes == 1 and lives is False else _SUCCESSION_S):
        return ""
    if lives is False:
        return (
            "the process ft run on this host has disappeared without reporting the end of the run; it may have been "
            "killed"
        )
    if is_steady or (age is not None and age > GONE_S):
        return "no process renews the lease of the control plane: ft run has been killed, or its host is lost"
    return ""
