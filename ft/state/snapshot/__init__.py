"""In-memory snapshots of every rank's training state, with copies on peers (DEADPOOL, sections V-B, VI-A and VI-E).

After every step, each worker (training process) copies its state to its host memory. It also sends the part that no
other rank has, its optimizer shard, to other workers; that is a peer copy. A recovery restores the state from them.

capture   collects a rank's state from megatron-core's objects, and writes it back
store     the interface for the training loop: take, wait, restore
transport moves copies between workers, over byte streams (TCP or MPI)
"""

from importlib import import_module

_PUBLIC = {
    "SnapshotServer": "ft.state.snapshot.transport",
    "Snapshots": "ft.state.snapshot.store",
    "TakeStats": "ft.state.snapshot.store",
}


def __getattr__(name: str):
    """Import a public name on first use, so that importing this package does not import torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ft.state.snapshot' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
