"""Byte streams between workers, over TCP or over MPI through the MPI process of the node, the relay.

Framed channels (:mod:`ft.net.framed`) use them to send the training state to other workers. With ``--ft-transport mpi``
these are streams over MPI. Workers are not MPI processes themselves, for these reasons (Open MPI 5.0 with mpi4py 4.1;
tools/experiments/results/mpi_facts.txt shows each):

* Workers are forked from a warm process, and any number of standbys (replacement workers) are started during the run.
MPI knows only the processes that mpirun has started, and accepts no others: ``MPI_Comm_accept`` and
``MPI_Comm_connect`` between processes that call ``MPI_Init`` on their own fail with MPI_ERR_INTERN, because they share
no PMIx server.
* A process that mpirun starts has to import everything first; forking from a warm process avoids these seconds.
* A fault inside MPI should break a connection, and not end the worker and lose its state.

So mpirun (or srun) starts one process per node. This process is the node's MPI process and the parent of the node's
agent (:mod:`ft.job.agent.mpirun`). It relays streams (:mod:`ft.net.mpi_relay`): a worker connects to the relay over a
Unix socket and names a worker of another node. MPI messages carry the bytes that the first worker writes to the other
node's relay, which writes them to the second worker. Frames, checksums, tokens, deadlines and retries are the same as
over TCP, because they belong to the layers above, :mod:`ft.net.framed` and :mod:`ft.state.transfer`.

When a node dies, its MPI process dies. MPI reports this to the other relays, which revoke the communicator, shrink it
and continue without the dead process (:mod:`ft.net.mpi_relay`). Standby nodes are members of the communicator from the
start, so a standby needs only new connections to take part. When a worker dies, its sockets are closed, and MPI is not
affected.
"""

import contextlib
import itertools
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

TRANSPORT = "FT_TRANSPORT"
"""Environment variable of a worker: "mpi"; all other values mean TCP."""


class Network(ABC):
    """Byte streams between workers. The network does not verify the data; the programs at both ends of a stream do."""

    @abstractmethod
    def listen(self) -> tuple[socket.socket, str]:
        """Return a listening socket, and the address at which other workers reach it."""

    @abstractmethod
    def dial(self, address: str, patience_s: float) -> socket.socket:
        """Return a connection to ``address``.

        Raises:
            OSError: no connection was established within ``patience_s`` seconds.
            TimeoutError: the other side has not answered at all.
        """


class TcpNetwork(Network):
    """The network over TCP. Addresses are "host:port".

    Args:
        host: address at which other nodes reach this node.
    """

    def __init__(self, host: str):
        self._host = host

    def listen(self) -> tuple[socket.socket, str]:
        listener = socket.create_server((self._host, 0), backlog=64)
        return listener, f"{self._host}:{listener.getsockname()[1]}"

    def dial(self, address: str, patience_s: float) -> socket.socket:
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=patience_s)


FOLDER, RANK = "FT_MPI_FOLDER", "FT_MPI_RANK"
"""Environment variables of a worker: the folder in which its node's relay listens, and the MPI rank of that node."""

RELAY = "relay"
_HELLO, _YES = 256, b"+"
_BACKLOG = 64


class MpiNetwork(Network):
    """The network over MPI. Addresses are "mpi:RANK/NAME": worker NAME on the node whose MPI process has rank RANK."""

    _names = itertools.count()

    def __init__(self, folder: str | Path, rank: int):
        self._folder, self._rank = Path(folder), rank

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "MpiNetwork":
        return cls(environment[FOLDER], int(environment[RANK]))

    def listen(self) -> tuple[socket.socket, str]:
        name = f"w{os.getpid()}-{next(self._names)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._folder / name))
        listener.listen(_BACKLOG)
        return listener, f"mpi:{self._rank}/{name}"

    def dial(self, address: str, patience_s: float) -> socket.socket:
        rank, name = parse(address)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(patience_s)
            connection.connect(str(self._folder / RELAY))
            connection.sendall(f"dial {rank} {name}\n".encode())
            answer = connection.recv(1)
            if answer != _YES:
                reason = b"" if not answer else connection.recv(_HELLO)
                raise ConnectionRefusedError(reason.decode(errors="replace") or "this node's MPI process hung up")
            return connection
        except BaseException:
            connection.close()
            raise


def parse(address: str) -> tuple[int, str]:
    """Return (rank, name) of an address.

    Raises:
        ConnectionError: it is not an address of this transport.
    """
    scheme, _, rest = address.partition(":")
    rank, _, name = rest.partition("/")
    if scheme != "mpi" or not rank.isdecimal() or not is_name(name):
        raise ConnectionError(f"{address!r} is no address over MPI: do all nodes run with --ft-transport mpi?")
    return int(rank), name


def is_name(text: str) -> bool:
    """Return whether ``text`` is a valid worker name. Names that lead out of the relay's folder are not."""
    return text[:1] == "w" and len(text) < 64 and text.replace("-", "").isalnum()


def answers(folder: str | Path, patience_s: float) -> bool:
    """Return whether the relay in ``folder`` is running and answers within ``patience_s`` seconds."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(patience_s)
        probe.connect(str(Path(folder) / RELAY))
        probe.sendall(b"ping\n")
        return probe.recv(1) == _YES
    return False


def network_of(environment: Mapping[str, str] = os.environ) -> Network:
    """Return the network that ``ft run`` has chosen for this worker (``--ft-transport``)."""
    if environment.get(TRANSPORT) == "mpi":
        return MpiNetwork.of(environment)
    return TcpNetwork(environment.get("FT_DATA_HOST") or environment.get("FT_HOST", "127.0.0.1"))
