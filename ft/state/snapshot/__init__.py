"""In-memory snapshots of every rank's training state, with copies on peers (DEADPOOL, sections V-B, VI-A and VI-E).

After every step, each worker copies its state to its host memory. It also sends the part that no other rank has, its
optimizer shard, to other workers; that is a peer copy. A recovery restores the state from them.

capture   collects a rank's state from megatron-core's objects, and writes it back
store     the interface for the training loop: take, wait, restore
transport moves copies between workers, over byte streams (TCP or MPI)
"""

from ft.state.snapshot.store import Snapshots, TakeStats
from ft.state.snapshot.transport import SnapshotServer

__all__ = ["SnapshotServer", "Snapshots", "TakeStats"]
