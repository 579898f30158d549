"""Moves snapshots of training state between workers (training processes), over TCP or another
:class:`ft.net.streams.Network`.

Every worker runs a server (:mod:`ft.state.transfer`), which stores the snapshots that peers push (peer copies) and
gives out the snapshots that it holds. For each peer that a worker sends snapshots to, it has one
:class:`ft.state.transfer.push.Sender`. An epoch is a version of the assignment of workers to logical ranks; a failure
closes it. The transport

* owns no buffers: the buffers belong to the store (:class:`ft.state.snapshot.copy_store.CopyStore`), and are allocated
  once;
* commits a copy only when every chunk has arrived with the right checksum, so that a transfer that ends in any other
  way leaves the previous complete copy intact;
* refuses data of an epoch that is closed or older than the current one;
* never blocks for ever: operations end within ``patience_s`` seconds without progress, and at once on ``cancel``.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ft.base.errors import FallbackError
from ft.net.streams import Network, TcpNetwork
from ft.state.snapshot.buffers import Part
from ft.state.snapshot.copy_store import CopyStore
from ft.state.snapshot.holder import SnapshotHolder
from ft.state.transfer import pull
from ft.state.transfer.moving import Disturb
from ft.state.transfer.push import CONNECT_S, Cancelled, Outgoing, PeerLost, Sender
from ft.state.transfer.server import Server

_FETCH_TRIES = 3
_NO_STEP = -2


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SnapshotServer:
    """One worker's end of the transport: sends snapshots to peers, receives peers' copies and serves fetches.

    It listens from its construction until :meth:`close`.

    Args:
        network: network that provides the streams; a string is a host name, at which to listen with TCP.
        token: secret shared by the workers of a run; connections that do not prove to know it are refused.
        patience_s: longest time without progress in a transfer, in seconds.
        max_bytes: largest peer copy accepted, in bytes; None: a quarter of this machine's memory.

    Attributes:
        address: address at which the server listens, in the format of its network.
        stock: the snapshots that this worker holds.
    """

    def __init__(
        self, network: Network | str, *, token: str = "", patience_s: float = 60.0, max_bytes: int | None = None
    ):
        self._network = TcpNetwork(network) if isinstance(network, str) else network
        self.stock = CopyStore()
        self._token, self._patience = token, patience_s
        self._holder = SnapshotHolder(self.stock, max_bytes or _physical_memory() // 4)
        self._lock = threading.Lock()
        self._addresses: dict[int, str] = {}
        self._senders: dict[int, Sender] = {}
        self._fetching: tuple[int, pull.Source] | None = None
        self._cancelled = -1
        self._closed = False
        self._server = Server(self._network, token, self._holder, patience_s=patience_s, name="ft-snapshot")
        self.address = self._server.address

    def place(self, addresses: Mapping[int, str]) -> None:
        """Set the addresses of the logical ranks. Connections to ranks with another address than before are closed."""
        with self._lock:
            self._addresses = dict(addresses)
            gone = [self._senders.pop(peer) for peer in list(self._senders) if peer not in addresses]
            senders = dict(self._senders)
        for sender in gone:
            sender.close()
        for peer, sender in senders.items():
            sender.move(addresses[peer])

    def send(self, peer: int, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Start to send ``outgoing`` to ``peer``, and return at once. Chunks are sent as soon as they are written.

        If the connection is lost, the transfer is repeated over a new one, a few times. ``ended`` is called once, from
        any thread: with None when the peer has verified and committed the copy, otherwise with the exception
        (:class:`ft.state.transfer.push.PeerLost` or :class:`ft.state.transfer.push.Cancelled`).
        """
        with self._lock:
            address = self._addresses.get(peer)
            if address is not None and peer not in self._senders:
                self._senders[peer] = Sender(self._network, peer, address, self._token, self._patience)
            sender = self._senders.get(peer)
        if sender is None:
            ended(PeerLost(f"nobody has said where logical rank {peer} is"))
            return
        sender.send(outgoing, ended)

    def disturb(self, how: Disturb) -> None:
        """Pass the chunks of the next snapshot to each peer through ``how``, for fault injection.

        Args:
            how: function (index of the chunk, number of chunks, pieces of data in which the chunk would be sent) ->
                pieces of data to send instead.
        """
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.disturb(how)

    def fetch(self, holder: int, wanted: pull.Wanted, epoch: int, part: Part) -> bytes:
        """Fill ``part`` with a section of a snapshot that another worker holds, and return the snapshot's ``meta``.

        Args:
            holder: logical rank that holds the snapshot.
            wanted: the snapshot and the section.
            epoch: epoch in which the section is fetched.
            part: memory of the section.

        Raises:
            FallbackError: there is no such snapshot, it is damaged, or its layout differs from that of ``part``.
            PeerLost: the holder cannot be reached or stops answering.
            Cancelled: the epoch was cancelled.
        """
        address = self._addresses.get(holder)
        if address is None:
            raise PeerLost(f"nobody has said where logical rank {holder} is")
        whom = f"logical rank {holder} at {address}"
        for attempt in range(_FETCH_TRIES):
            time.sleep(0.05 * attempt)
            source = pull.Source(self._network, address, self._token, self._patience)
            self._fetching = (epoch, source)
            try:
                self._check_open(epoch)
                source.open(min(CONNECT_S, self._patience))
                envelope = source.state(wanted, part.table)
                source.receive(range(part.table.nbytes), part)
                return envelope
            except (pull.Gone, pull.Bad) as error:
                whose = f"logical rank {holder}'s copy of rank {wanted.rank}'s step {wanted.step}"
                raise FallbackError(f"{whose}: {error}") from error
            except pull.Lost as error:
                self._check_open(epoch)
                if isinstance(error, pull.Silent):
                    raise PeerLost(f"{whom} {error}") from error
                problem = error
            finally:
                self._fetching = None
                source.close()
        raise PeerLost(f"cannot fetch from {whom}: {problem}") from problem

    def reach_itself(self, patience_s: float) -> None:
        """Ask this server, over its own address, for a snapshot that nobody has, and wait for the answer.

        Raises:
            ConnectionError: there is no answer within ``patience_s`` seconds, or not the right one.
        """
        source = pull.Source(self._network, self.address, self._token, patience_s)
        try:
            source.open(patience_s)
            source.envelope(pull.Wanted(_NO_STEP))
        except pull.Gone:
            return
        except (pull.Lost, pull.Bad) as error:
            raise ConnectionError(f"{self.address} {error}") from error
        finally:
            source.close()
        raise ConnectionError(f"{self.address} gives out a snapshot that nobody has")

    def cancel(self, epoch: int) -> None:
        """Cancel the operations of ``epoch`` and of earlier epochs, and refuse new ones.

        Safe from any thread; returns at once.
        """
        self._cancelled = max(self._cancelled, epoch)
        self._holder.cancel(epoch)
        fetching = self._fetching
        if fetching is not None and fetching[0] <= epoch:
            fetching[1].cut("cancelled")
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.cancel(epoch)

    def quiesce(self) -> None:
        """After ``cancel``, wait until no thread of the transport writes into the store any more."""
        self._holder.quiesce()

    def close(self) -> None:
        """End all threads and connections, and free the store."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.cancel(sys.maxsize)
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.close()
        self._server.close()
        self.stock.close()

    def _check_open(self, epoch: int) -> None:
        if epoch <= self._cancelled:
            raise Cancelled(f"epoch {epoch} is over: nothing is fetched for it any more")
