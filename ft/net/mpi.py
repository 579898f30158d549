"""The MPI transport, seen from a worker: connections to other workers through its node's MPI process.

Why workers are no MPI processes themselves (Open MPI 5.0 with mpi4py 4.1, tools/experiments/mpi_facts.py shows each):

* They are forked from a warm process, and standbys in any number while the run goes on. MPI knows the processes that
  mpirun has started, and takes no others in: ``MPI_Comm_accept`` and ``MPI_Comm_connect`` between processes that call
  ``MPI_Init`` on their own end in MPI_ERR_INTERN, because there is no server of PMIx that both know.
* What mpirun starts itself imports everything first: the seconds that the warm pool saves.
* A fault inside MPI should cost a connection, not the worker and its state.

So mpirun (or srun) starts one process per node, which is the MPI process of this node and the parent of its agent
(:mod:`ft.job.agent.mpirun`). It relays (:mod:`ft.net.mpi_relay`): a worker connects to it over a Unix socket, names
another node's worker, and what is written then comes out there, carried by MPI messages. Frames, checksums, tokens,
deadlines and retries are those of the TCP transport, because they lie above:
:class:`ft.state.snapshot.tcp.SnapshotServer` runs over either.

A dead node is a dead MPI process. The relays learn it from MPI, revoke the communicator, shrink it and go on with the
rest (:mod:`ft.net.mpi_world`). Nodes of standbys have been in it since the start, so a standby is taken in by
being dialled. A worker's death is the end of its sockets and does not concern MPI.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from ft.net.streams import Network

FOLDER, RANK = "FT_MPI_FOLDER", "FT_MPI_RANK"
"""Environment of a worker: where its node's relay listens; that node's rank in MPI."""

RELAY = "relay"
_HELLO, _YES = 256, b"+"
_BACKLOG = 64


class MpiNetwork(Network):
    """Addresses are "mpi:RANK/NAME": the worker that listens as NAME on the node whose MPI process is RANK.

    Args:
        folder: of this node's relay. rank: of this node's MPI process.
    """

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
    """(rank, name) of an address.

    Raises:
        ConnectionError: it is none of this transport's.
    """
    scheme, _, rest = address.partition(":")
    rank, _, name = rest.partition("/")
    if scheme != "mpi" or not rank.isdecimal() or not is_name(name):
        raise ConnectionError(f"{address!r} is no address over MPI: do all nodes run with --ft-transport mpi?")
    return int(rank), name


def is_name(text: str) -> bool:
    """Whether ``text`` can be a worker's name: one that leads out of the relay's folder cannot."""
    return text[:1] == "w" and len(text) < 64 and text.replace("-", "").isalnum()


def answers(folder: str | Path, patience_s: float) -> bool:
    """Whether the relay in ``folder`` takes part in MPI and answers within ``patience_s``."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(patience_s)
        probe.connect(str(Path(folder) / RELAY))
        probe.sendall(b"ping\n")
        return probe.recv(1) == _YES
    return False
