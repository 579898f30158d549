"""The snapshot transport over stream connections: each worker runs a server that stores peer copies and serves fetches,
and one sender for each peer. The streams are TCP's, or those of another :class:`ft.net.streams.Network`."""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ft.net import handshake
from ft.net.streams import Network, TcpNetwork
from ft.state.snapshot.buffers import Part
from ft.state.snapshot.copy_store import CopyStore
from ft.state.snapshot.layout import checksum
from ft.state.snapshot.receive import RequestHandler
from ft.state.snapshot.tcp_sender import Sender
from ft.state.snapshot.transport import Cancelled, CopyUnusable, Outgoing, PeerLost, Transport, Wanted, check_table
from ft.state.snapshot.wire import BadFrame, Wire

_HELLO_S = 10.0
_CONNECT_S = 3.0
_MAX_CONNECTIONS = 128
_FETCH_TRIES = 3


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class SnapshotServer(Transport):
    """The transport of one worker. ``address`` is where its server listens, in the form that its network uses.

    Args:
        network: the network that carries the streams, or a host name, which stands for TCP on that host.
        token: secret that the workers of a run share; connections that do not prove to know it are refused.
        patience_s: maximum seconds without progress in a transfer.
        max_bytes: size of the largest peer copy to accept, in bytes; default: a quarter of this machine's memory.
    """

    def __init__(
        self, network: Network | str, *, token: str = "", patience_s: float = 60.0, max_bytes: int | None = None
    ):
        self._network = TcpNetwork(network) if isinstance(network, str) else network
        self.stock = CopyStore()
        self._token, self._patience = token, patience_s
        self._desk = RequestHandler(self.stock, max_bytes or _physical_memory() // 4)
        self._lock = threading.Lock()
        self._addresses: dict[int, str] = {}
        self._senders: dict[int, Sender] = {}
        self._connections: set[Wire] = set()
        self._threads: set[threading.Thread] = set()
        self._fetching: tuple[int, Wire] | None = None
        self._cancelled = -1
        self._closed = False
        self._listener, self.address = self._network.listen()
        self._acceptor = threading.Thread(target=self._accept, name="ft-snapshot-accept", daemon=True)
        self._acceptor.start()

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

    def disturb(self, how: Callable[[int, int, list], list[list]]) -> None:
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
            wire = None
            try:
                wire = Wire(self._network.dial(address, min(_CONNECT_S, self._patience)), self._patience)
                self._fetching = (wanted.epoch, wire)
                self._check_open(wanted)
                wire.greet(self._token, self._patience)
                return self._fetch(wire, wanted, part)
            except TimeoutError as error:
                raise PeerLost(f"{whom} does not answer: {error}") from error
            except handshake.Refused as refusal:
                raise CopyUnusable(f"{_copy(wanted)}: {refusal}") from refusal
            except (OSError, BadFrame) as error:
                self._check_open(wanted)
                problem = error
            finally:
                self._fetching = None
                if wire is not None:
                    wire.close()
        raise PeerLost(f"cannot fetch from {whom}: {problem}") from problem

    def cancel(self, epoch: int) -> None:
        self._cancelled = max(self._cancelled, epoch)
        self._desk.cancel(epoch)
        fetching = self._fetching
        if fetching is not None and fetching[0] <= epoch:
            fetching[1].shutdown()
        with self._lock:
            senders = list(self._senders.values())
        for sender in senders:
            sender.cancel(epoch)

    def quiesce(self) -> None:
        self._desk.quiesce()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.cancel(sys.maxsize)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            connections, threads, senders = list(self._connections), list(self._threads), list(self._senders.values())
        for sender in senders:
            sender.close()
        for wire in connections:
            wire.shutdown()
        for thread in threads:
            thread.join()
        self.stock.close()

    def _check_open(self, wanted: Wanted) -> None:
        if wanted.epoch <= self._cancelled:
            raise Cancelled(f"epoch {wanted.epoch} is over: nothing is fetched for it any more")

    def _fetch(self, wire: Wire, wanted: Wanted, part: Part) -> bytes:
        numbers = {"owner": wanted.owner, "step": wanted.step, "section": wanted.section}
        wire.send({"kind": "get", **numbers})
        answer = wire.receive()
        whose = _copy(wanted)
        if answer["kind"] != "copy":
            raise CopyUnusable(f"{whose}: {answer.get('reason', answer['kind'])}")
        table, meta = wire.take(answer["table"]), wire.take(answer["meta"])
        if checksum(meta) != answer["meta_checksum"]:
            raise CopyUnusable(f"{whose} is damaged: its envelope")
        check_table(part, bytes(table), f"logical rank {wanted.holder}")
        damaged = wire.receive_part(part)
        if damaged is not None:
            raise CopyUnusable(f"{whose} is damaged: chunk {damaged} of {len(part.checksums)}")
        return bytes(meta)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of file descriptors: wait until connections in use are closed
                continue
            with self._lock:
                refused = self._closed or len(self._connections) >= _MAX_CONNECTIONS
                if not refused:
                    wire = Wire(connection, _HELLO_S)
                    thread = threading.Thread(target=self._serve, args=(wire,), name="ft-snapshot-serve", daemon=True)
                    self._connections.add(wire)
                    self._threads.add(thread)
                    thread.start()
            if refused:
                connection.close()

    def _serve(self, wire: Wire) -> None:
        """Answer the requests of one connection until it ends; close it at the first byte that fits no handshake."""
        try:
            wire.welcome(self._token, _HELLO_S)
            while True:
                wire.be_patient(0)
                header = wire.receive()
                wire.be_patient(self._patience)
                self._desk.answer(wire, header)
        except (OSError, handshake.Refused, BadFrame, KeyError, TypeError, ValueError):
            return  # the other end finds its connection closed, and reports what it was for
        finally:
            with self._lock:
                self._connections.discard(wire)
                self._threads.discard(threading.current_thread())
            wire.close()


def _copy(wanted: Wanted) -> str:
    return f"logical rank {wanted.holder}'s copy of rank {wanted.owner}'s step {wanted.step}"
