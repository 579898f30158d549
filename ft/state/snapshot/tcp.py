"""Snapshot transport over byte streams: TCP, or another :class:`ft.net.streams.Network`.

Every worker runs a server (:mod:`ft.state.transfer`), which stores the snapshots that peers push (peer copies) and
gives out the snapshots that it holds. For each peer that a worker sends snapshots to, it has one
:class:`ft.state.transfer.push.Sender`. The interface and its guarantees are described in
:mod:`ft.state.snapshot.transport`.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ft.net.streams import Network, TcpNetwork
from ft.state.snapshot.buffers import Part
from ft.state.snapshot.copy_store import CopyStore
from ft.state.snapshot.receive import SnapshotHolder
from ft.state.snapshot.transport import CopyUnusable, Transport, Wanted
from ft.state.transfer import pull
from ft.state.transfer.moving import Disturb
from ft.state.transfer.push import CONNECT_S, Cancelled, Outgoing, PeerLost, Sender
from ft.state.transfer.server import Server

_FETCH_TRIES = 3


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SnapshotServer(Transport):
    """One worker's end of the transport. It listens from its construction until :meth:`close`.

    Args:
        network: network that provides the streams; a string is a host name, at which to listen with TCP.
        token: secret shared by the workers of a run; connections that do not prove to know it are refused.
        patience_s: longest time without progress in a transfer, in seconds.
        max_bytes: largest peer copy accepted, in bytes; None: a quarter of this machine's memory.

    Attributes:
        address: address at which the server listens, in the format of its network.
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
        with self._lock:
            self._addresses = dict(addresses)
            gone = [self._senders.pop(peer) for peer in list(self._senders) if peer not in addresses]
            senders = dict(self._senders)
        for sender in gone:
            sender.close()
        for peer, sender in senders.items():
            sender.move(addresses[peer])

    def send(self, peer: int, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
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
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.disturb(how)

    def fetch(self, wanted: Wanted, part: Part) -> bytes:
        address = self._addresses.get(wanted.holder)
        if address is None:
            raise PeerLost(f"nobody has said where logical rank {wanted.holder} is")
        whom = f"logical rank {wanted.holder} at {address}"
        for attempt in range(_FETCH_TRIES):
            time.sleep(0.05 * attempt)
            source = pull.Source(self._network, address, self._token, self._patience)
            self._fetching = (wanted.epoch, source)
            try:
                self._check_open(wanted)
                source.open(min(CONNECT_S, self._patience))
                envelope = source.state(pull.Wanted(wanted.step, None, wanted.owner, wanted.section), part.table)
                source.receive(range(part.table.nbytes), part)
                return envelope
            except (pull.Gone, pull.Bad) as error:
                whose = f"logical rank {wanted.holder}'s copy of rank {wanted.owner}'s step {wanted.step}"
                raise CopyUnusable(f"{whose}: {error}") from error
            except pull.Lost as error:
                self._check_open(wanted)
                if isinstance(error, pull.Silent):
                    raise PeerLost(f"{whom} {error}") from error
                problem = error
            finally:
                self._fetching = None
                source.close()
        raise PeerLost(f"cannot fetch from {whom}: {problem}") from problem

    def cancel(self, epoch: int) -> None:
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
        self._holder.quiesce()

    def close(self) -> None:
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

    def _check_open(self, wanted: Wanted) -> None:
        if wanted.epoch <= self._cancelled:
            raise Cancelled(f"epoch {wanted.epoch} is over: nothing is fetched for it any more")
