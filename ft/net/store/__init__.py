"""A key-value store over TCP for the members of a run, who prove with the run's token that they belong to it.

Process groups rendezvous in it, and the control channel uses it. torch's own TCPStore serves whoever reaches its port.
"""

from ft.net.store.client import StoreConnection
from ft.net.store.server import StoreServer, lone_tcp_store

__all__ = ["StoreConnection", "StoreServer", "lone_tcp_store"]
