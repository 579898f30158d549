"""One logical rank of a measurement: real process groups, rebuilt as ``ft.systems.hot_swap.recovery`` does it."""

import json
import time
from datetime import timedelta

import torch.distributed as dist

from ft.lab.simulate.recovery.topology import Sizes, make_groups
from ft.state.groups import Groups, Meeting

PATIENCE = timedelta(seconds=120)


def follow(meeting: Meeting, rank: int, sizes: Sizes, epoch: int, joins: bool) -> None:
    """Does what is ordered through the store at ``meeting`` until it is told to end.

    Keys: ``ready/EPOCH/RANK`` when its groups are there, ``order/EPOCH`` (a JSON object: rebuild, defer; or "end"),
    ``left/EPOCH/RANK``, ``go/EPOCH``, ``done/EPOCH/RANK`` (a JSON object of what it took).

    Args:
        epoch: the one it begins in. joins: it takes the place of a rank that was lost in it, and is connected by the
            next order.
    """
    store = meeting.connect().store
    store.set_timeout(PATIENCE)
    groups = Groups.start(
        meeting=meeting,
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
        took = _rebuild(groups, json.loads(order), epoch + 1)
        store.set(f"done/{epoch}/{rank}", json.dumps(took))
        epoch += 1
        use_all()
        store.set(f"ready/{epoch}/{rank}", "")


def use_all() -> None:
    """A barrier in every group, in the order of creation: it works, and deferred ones are connected."""
    for group in list(dist.distributed_c10d._world.pg_names):
        if group.size() > 1:
            dist.barrier(group)


def _rebuild(groups: Groups, order: dict, epoch: int) -> dict[str, float]:
    """Wall and processor seconds of the production code for it; the latter over all threads of this process."""
    began = time.process_time()
    wall = groups.rebuild(order["rebuild"], order["defer"], f"groups/{epoch}", epoch)
    cpu = time.process_time() - began
    groups.reopen(epoch)
    return {"wall_s": wall, "cpu_s": cpu}
