"""Snapshots of every rank's state in host memory, and copies of them with peers (paper, sections V-B, VI-A, VI-E).

capture   what belongs to a rank's state, out of megatron-core's objects and back into them
store     take, wait, restore: the training loop's side
transport what carries copies between workers; ``tcp`` is the one there is, over streams of a ``network``: TCP or MPI
"""

from importlib import import_module

_PUBLIC = {
    "SnapshotServer": "ft.state.snapshot.tcp",
    "Snapshots": "ft.state.snapshot.store",
    "TakeStats": "ft.state.snapshot.store",
    "peers_of": "ft.state.snapshot.peers",
}


def __getattr__(name: str):
    """Loads what is asked for: an agent uses the networks below, and starts without torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ft.state.snapshot' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
