"""Pushes states to one peer, over a persistent connection that is reopened when it is lost."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ft.base.errors import RecoverableError
from ft.net import handshake
from ft.net.framed import BadFrame, FramedChannel, Mark
from ft.net.streams import Network
from ft.state.layout import StateMemory
from ft.state.transfer.server import DAMAGED, HELD, PURPOSE, PUSH, READY, Disturb, send_range

_PAUSES_S = (0.0, 0.05, 0.25)
"""Seconds before each try: a dropped connection is retried, and a dead peer is reported within half a second."""

CONNECT_S = 3.0
"""Longest time to connect to a peer, in seconds."""


class PeerLost(RecoverableError):
    """A peer cannot be reached, does not answer, or refuses a copy."""


class Cancelled(RecoverableError):
    """The operation was cancelled."""


class _NotTaken(Exception):
    """The peer has refused the state and given a reason; a retry does not help."""


@dataclass(frozen=True)
class Outgoing:
    """A state that is being pushed.

    Attributes:
        mark: which state it is, with the epoch in which it was taken.
        memory: its tensors.
        envelope: everything but the tensors, encoded.
        ready: waits until the bytes before an offset are written; raises RuntimeError if they will not be.
    """

    mark: Mark
    memory: StateMemory
    envelope: bytes
    ready: Callable[[int], None]


_Job = tuple[Outgoing, Callable[[Exception | None], None], threading.Event]
"""A push, the function to call at its end, and the event that cancels it."""


class Sender:
    """Pushes states to one peer, from one thread, one at a time.

    Args:
        network: the network of the address.
        peer: logical rank of the peer.
        address: address of the peer.
        token: token of the run.
        patience_s: longest time without progress, in seconds.
    """

    def __init__(self, network: Network, peer: int, address: str, token: str, patience_s: float):
        self._network = network
        self._peer, self._address, self._token, self._patience = peer, address, token, patience_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channel: FramedChannel | None = None
        self._disturb: Disturb | None = None
        self._epoch, self._cancelled = -1, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"ft-push-to-{peer}", daemon=True)
        self._thread.start()

    def send(self, outgoing: Outgoing, ended: Callable[[Exception | None], None]) -> None:
        """Start to push ``outgoing``; ``ended`` is called with None once the peer has it, else with the exception."""
        self._epoch, self._cancelled = outgoing.mark.epoch, threading.Event()
        self._jobs.put((outgoing, ended, self._cancelled))

    def disturb(self, how: Disturb) -> None:
        """Pass the chunks of the next push through ``how``, once. For fault injection."""
        self._disturb = how

    def move(self, address: str) -> None:
        """Set the peer's address; cancel the current push if the address has changed."""
        if address != self._address:
            self._address = address
            self.cancel(self._epoch)

    def cancel(self, epoch: int) -> None:
        """Cancel the current push if it belongs to ``epoch`` or an earlier one."""
        if self._epoch > epoch:
            return
        self._cancelled.set()
        with self._lock:
            if self._channel is not None:
                self._channel.shutdown()

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
                channel = self._connected()
                if cancelled.is_set():
                    break
                self._push(channel, outgoing)
                return None
            except (ConnectionError, BadFrame) as error:
                problem = error
            except (OSError, handshake.HandshakeRefused, _NotTaken, RuntimeError) as error:
                self._drop()
                return Cancelled("given up") if cancelled.is_set() else PeerLost(f"{whom} takes no copy: {error}")
            self._drop()
        if cancelled.is_set():
            return Cancelled(f"the transfer of step {outgoing.mark.step} to {whom} was given up")
        return PeerLost(f"{whom} takes no copy, after {len(_PAUSES_S)} tries: {problem}")

    def _connected(self) -> FramedChannel:
        with self._lock:
            if self._channel is not None and not self._channel.is_shut:
                return self._channel
        self._drop()
        channel = FramedChannel(self._network.dial(self._address, min(CONNECT_S, self._patience)), self._patience)
        with self._lock:
            self._channel = channel
        channel.dial(self._token, PURPOSE, self._patience)
        return channel

    def _push(self, channel: FramedChannel, outgoing: Outgoing) -> None:
        mark, memory = outgoing.mark, outgoing.memory
        channel.send(PUSH, mark, {}, memory.table.encoded, outgoing.envelope)
        answer = channel.receive()
        if answer.kind == READY:

            @contextmanager
            def reading(start: int, stop: int) -> Iterator[StateMemory]:
                outgoing.ready(stop)
                yield memory

            disturb, self._disturb = self._disturb, None
            send_range(channel, mark, range(memory.table.nbytes), reading, disturb)
            answer = channel.receive()
        if answer.kind == DAMAGED:
            raise ConnectionError(f"the chunk at byte {answer.words.get('offset')} was damaged on the way")
        if answer.kind != HELD:
            raise _NotTaken(str(answer.words.get("reason", answer.kind)))

    def _drop(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
