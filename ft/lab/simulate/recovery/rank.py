"""The process of one rank in a measurement of ``ft.lab.simulate.recovery.measure``.

It creates real process groups, and rebuilds them on order with the same production code as
``ft.systems.hot_swap.recovery``. Each rebuild begins a new epoch, a version of the map from logical ranks to processes.
"""

import json
import time
from datetime import timedelta

import torch.distributed as dist

from ft.base import bounded_json
from ft.lab.simulate.recovery.topology import Sizes, make_groups
from ft.state.groups import Groups, Rendezvous

PATIENCE = timedelta(seconds=600)
"""Timeout of the store, of the process groups, and of the measuring process that waits for the ranks."""


def follow(rendezvous: Rendezvous, rank: int, sizes: Sizes, epoch: int, joins: bool) -> None:
    """Execute the orders that the measuring process writes to the rendezvous store, until the order is "end".

    Keys in the store, in their order within an epoch: ``ready/EPOCH/RANK`` (this rank's groups exist), ``order/EPOCH``
    (a JSON object with rebuild and defer, or "end"), ``left/EPOCH/RANK`` (this rank has dropped its old connections),
    ``go/EPOCH`` (start the rebuild), ``done/EPOCH/RANK`` (a JSON object with the times).

    Args:
        rendezvous: address and token of the store.
        rank: logical rank of this process.
        sizes: the parallel layout.
        epoch: epoch in which this process starts.
        joins: whether this process replaces a rank that was lost in this epoch; the next rebuild then connects it.
    """
    store = rendezvous.connect()
    store.set_timeout(PATIENCE)
    groups = Groups.start(
        rendezvous=rendezvous,
        prefix=f"groups/{epoch}",
        rank=rank,
        world_size=sizes.ranks,
        device_backend="gloo",
        alone=joins,
        on_failure=lambda group, error: None,
        epoch=epoch,
        timeout_s=PATIENCE.total_seconds(),
    )
    make_groups(sizes)
    if not joins:
        use_all()
    store.set(f"ready/{epoch}/{rank}", "")
    while (order := store.get(f"order/{epoch}")) != b"end":
        groups.close(epoch, "measured")
        groups.drop()
        store.set(f"left/{epoch}/{rank}", "")
        store.wait([f"go/{epoch}"])
        took = _rebuild(groups, bounded_json.loads(order, non_finite=True), epoch + 1)
        store.set(f"done/{epoch}/{rank}", json.dumps(took))
        epoch += 1
        use_all()
        store.set(f"ready/{epoch}/{rank}", "")


def use_all() -> None:
    """Run a barrier in every group, in the order of creation. This checks that each group works, and connects the
    groups whose connection was deferred to their first use.
    """
    for group in list(dist.distributed_c10d._world.pg_names):
        if group.size() > 1:
            dist.barrier(group)


def _rebuild(groups: Groups, order: dict, epoch: int) -> dict[str, float]:
    """Rebuild the groups, and return the wall time and the CPU time of all threads of this process, in seconds."""
    began = time.process_time()
    wall = groups.rebuild(order["rebuild"], order["defer"], f"groups/{epoch}", epoch)
    cpu = time.process_time() - began
    groups.reopen(epoch)
    return {"wall_s": wall, "cpu_s": cpu}
