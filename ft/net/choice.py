"""Chooses the network, TCP or MPI, over which a worker (training process) sends snapshots to other workers."""

import os
from collections.abc import Mapping

from ft.net.mpi import MpiNetwork
from ft.net.streams import TRANSPORT, Network, TcpNetwork


def network_of(environment: Mapping[str, str] = os.environ) -> Network:
    """Return the network that ``ft run`` has chosen for this worker (``--ft-transport``)."""
    if environment.get(TRANSPORT) == "mpi":
        return MpiNetwork.of(environment)
    return TcpNetwork(environment.get("FT_HOST", "127.0.0.1"))
