"""The store in which the nodes of a check meet."""

from typing import TYPE_CHECKING

from ft.lab.selftest.values import Context

if TYPE_CHECKING:
    import torch.distributed as dist


def of_all_nodes(context: Context) -> "dist.Store | None":
    """Return a connection to the store of all nodes, with keys of this check only; None if there is one node."""
    if not context.store:
        return None
    import torch.distributed as dist  # the check of versions has to run where torch is missing, too

    from ft.net.store import StoreConnection

    return dist.PrefixStore(context.check, StoreConnection(context.store, context.token, context.limit_s))
