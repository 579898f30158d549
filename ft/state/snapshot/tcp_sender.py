"""Delivery of snapshots to one peer, over a persistent connection that is reopened when it is lost."""

import queue
import threading
from collections.abc import Callable

from ft.net import handshake
from ft.net.streams import Network
from ft.state.snapshot.layout import checksum
from ft.state.snapshot.transport import Cancelled, Outgoing, PeerLost
from ft.state.snapshot.wire import BadFrame, Wire

_PAUSES_S = (0.0, 0.05, 0.25)
"""Seconds before each try: a dropped connection is retried, and a dead peer is reported within half a second."""

_CONNECT_S = 3.0


class _NotTaken(Exception):
    """The peer has refused the copy and given a reason; a retry does not help."""


class Sender:
    """Sends snapshots to one peer, from one thread, one transfer at a time."""

    def __init__(self, network: Network, peer: int, address: str, token: str, patience_s: float):
        self._network = network
        self._peer, self._address, self._token, self._patience = peer, address, token, patience_s
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._disturb: Callable[[int, int, list], list[list]] | None = None
        self._epoch, self._cancelled = -1, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ft-snapshot-to-{peer}", daemon=True)
        self._thread.start()

    def send(self, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        self._epoch, self._cancelled = outgoing.epoch, threading.Event()
        self._jobs.put((outgoing, ended, self._cancelled))

    def disturb(self, how: Callable[[int, int, list], list[list]]) -> None:
        """Pass the chunks of the next transfer through ``how`` (``Wire.disturb``), once. For fault injection."""
        self._disturb = how

    def move(self, address: str) -> None:
        """Set the peer's address; cancel the current transfer if the address has changed."""
        if address != self._address:
            self._address = address
            self.cancel(self._epoch)

    def cancel(self, epoch: int) -> None:
        """Cancel the current transfer if it belongs to ``epoch`` or an earlier one."""
        if self._epoch > epoch:
            return
        self._cancelled.set()
        with self._lock:
            if self._wire is not None:
                self._wire.shutdown()

    def close(self) -> None:
        self.cancel(self._epoch)
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            outgoing, ended, cancelled = job
            try:
                ended(self._deliver(outgoing, cancelled))
            finally:
                del job, outgoing, ended, cancelled  # hold no references while the thread waits
        self._drop()

    def _deliver(self, outgoing: Outgoing, cancelled: threading.Event) -> Exception | None:
        whom, problem = f"logical rank {self._peer} at {self._address}", None
        for pause in _PAUSES_S:
            if cancelled.wait(pause) if pause else cancelled.is_set():
                break
            try:
                wire = self._connected()
                if cancelled.is_set():
                    break
                self._transfer(wire, outgoing)
                return None
            except (ConnectionError, BadFrame) as error:
                problem = error
            except (OSError, handshake.Refused, _NotTaken, RuntimeError) as error:
                self._drop()
                return Cancelled("given up") if cancelled.is_set() else PeerLost(f"{whom} takes no copy: {error}")
            self._drop()
        if cancelled.is_set():
            return Cancelled(f"the transfer of step {outgoing.step} to {whom} was given up")
        return PeerLost(f"{whom} takes no copy, after {len(_PAUSES_S)} tries: {problem}")

    def _connected(self) -> Wire:
        with self._lock:
            if self._wire is not None and not self._wire.is_shut:
                return self._wire
        self._drop()
        wire = Wire(self._network.dial(self._address, min(_CONNECT_S, self._patience)), self._patience)
        with self._lock:
            self._wire = wire
        wire.greet(self._token, self._patience)
        return wire

    def _transfer(self, wire: Wire, outgoing: Outgoing) -> None:
        table = outgoing.part.table
        numbers = {"owner": outgoing.owner, "step": outgoing.step, "epoch": outgoing.epoch}
        sizes = {"table": len(table.encoded), "meta": len(outgoing.meta), "length": table.nbytes}
        checks = {"digest": table.digest, "meta_checksum": checksum(outgoing.meta)}
        wire.send({"kind": "put", **numbers, **sizes, **checks}, table.encoded, outgoing.meta)
        answer = wire.receive()
        if answer["kind"] == "go":
            wire.disturb, self._disturb = self._disturb, None
            wire.send_part(outgoing.part, lambda wanted: outgoing.progress.ready(outgoing.part, wanted))
            answer = wire.receive()
        if answer["kind"] == "damaged":
            raise ConnectionError(f"chunk {answer.get('chunk')} was damaged on the way")
        if answer["kind"] != "held":
            raise _NotTaken(str(answer.get("reason", answer["kind"])))

    def _drop(self) -> None:
        with self._lock:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
