"""A TCPStore with access control: only members of the run can connect to it.

Process groups rendezvous in it. torch's TCPStore has no authentication: any process that finds its port can read and
write. Here, a packet filter on that port drops all packets except those of announced connections. A client announces
its connection on a second port, the admission port, where it has to prove that it knows the run's secret token.
"""

from ft.net.store.client import StoreConnection
from ft.net.store.server import StoreServer, warm_up

__all__ = ["StoreConnection", "StoreServer", "warm_up"]
