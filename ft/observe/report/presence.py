"""Whether anybody is still at a run that has not ended: its files alone look the same after a SIGKILL."""

from pathlib import Path

from ft.platform import election as election
from ft.platform import processes

GONE_S = 60.0
"""A control plane of another host that has written nothing for so long does not come back: one that takes over may be
importing for half of that."""

_SUCCESSION_S, _RENEWAL_S = 5.0, 0.5
"""Another node takes the lease over within the first; on one node nobody does, and a renewal comes in the second."""


def gone(folder: Path, age: float | None, nodes: int, *, is_steady: bool = False) -> str:
    """Why nobody is at the run any more; "" while somebody is, or may be.

    Args:
        folder: of the lease. age: seconds since anything was written, None: nothing was. nodes: of the run.
        is_steady: whoever has the lease renews it without a pause from the moment that it is taken over.
    """
    standing = election.read(folder)
    if standing is None:
        return ""
    lives = processes.lives(standing.launcher) if standing.launcher else None
    if lives or election.is_kept(folder, _RENEWAL_S if nodes == 1 and lives is False else _SUCCESSION_S):
        return ""
    if lives is False:
        return "its ft run on this host is gone, and it has not said that it ends: killed, perhaps"
    if is_steady or (age is not None and age > GONE_S):
        return "nobody renews its lease: its ft run has been killed, or its host is lost"
    return ""
