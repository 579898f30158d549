"""In-memory snapshots of every rank's state, and copies of them on peers (DEADPOOL, sections V-B, VI-A and VI-E).

capture   collects a rank's state from megatron-core's objects, and puts it back
store     take, wait, restore: the interface for the training loop
transport moves copies between workers; ``tcp`` implements it, over streams of a ``network``: TCP or MPI
"""

from importlib import import_module

_PUBLIC = {
    "SnapshotServer": "ft.state.snapshot.tcp",
    "Snapshots": "ft.state.snapshot.store",
    "TakeStats": "ft.state.snapshot.store",
    "peers_of": "ft.state.snapshot.peers",
}


def __getattr__(name: str):
    """Import a public name on first use: an agent uses the networks below, and starts without torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ft.state.snapshot' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
