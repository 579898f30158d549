"""Snapshots of every rank's state in host memory, and copies of them with peers (paper, sections V-B, VI-A, VI-E).

capture   what belongs to a rank's state, out of megatron-core's objects and back into them
store     take, wait, restore: the training loop's side
transport what carries copies between workers; ``tcp`` is the one there is, over streams of a ``network``: TCP or MPI
"""

from ft.snapshot.peers import peers_of
from ft.snapshot.store import Snapshots, TakeStats
from ft.snapshot.tcp import SnapshotServer

__all__ = ["SnapshotServer", "Snapshots", "TakeStats", "peers_of"]
