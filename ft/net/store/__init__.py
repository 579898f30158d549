"""A TCPStore that only members of the run reach.

torch's store asks nobody who he is: whoever finds the port reads and writes what he likes. Here its port lets no packet
in except those of connections that were announced at a door beside it, by somebody who knows the run's token.
"""

from ft.net.store.client import StoreConnection
from ft.net.store.server import StoreServer, warm_up

__all__ = ["StoreConnection", "StoreServer", "warm_up"]
