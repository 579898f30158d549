"""A TCPStore with access control: only members of the run can connect to it.

torch's TCPStore has no authentication: any process that finds its port can read and write. Here, a packet filter on its
port drops all packets, except those of connections that were announced at a second port by a client that knows the
run's token.
"""

from ft.net.store.client import StoreConnection
from ft.net.store.server import StoreServer, warm_up

__all__ = ["StoreConnection", "StoreServer", "warm_up"]
