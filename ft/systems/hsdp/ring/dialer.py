"""Connecting to the right neighbour of a ring: a short-lived thread dials, and the driver's poll loop runs the
handshake.
"""

import errno
import socket
import threading
from dataclasses import replace

from ft.base.errors import ReplaceNodeError
from ft.net.handshake import GREETING_BYTES
from ft.net.streams import Network
from ft.systems.hsdp.ring.control import BREAK, Control, Message
from ft.systems.hsdp.ring.hello import ANSWER_BYTES, TAKEN, WHY, Hello, party, read_answer, write_hello
from ft.systems.hsdp.ring.outcome import Broken
from ft.systems.hsdp.ring.poller import READ, Poller

_LOCAL = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EADDRNOTAVAIL)
"""Errors of connecting whose cause is on this node."""


class _Call:
    """One connection during its handshake.

    Attributes:
        theirs: the neighbour's challenge.
        said: bytes received of the present message, which has ``wanted`` bytes.
        is_taken: whether the neighbour has accepted the connection.
    """

    def __init__(self, connection: socket.socket, hello: Hello, token: str):
        self.connection, self.hello = connection, hello
        self.party, self.theirs = party(token, is_dialer=True), b""
        self.said, self.wanted = bytearray(), GREETING_BYTES
        self.is_taken = False


class Dialer:
    """Opens the connections of one quorum to the right neighbour. Used by the driver's thread.

    Args:
        poller: the poll loop that runs the handshakes.
        network: the network that carries the connections.
        address: address of the neighbour.
        index: index of the neighbour among the members.
        hello: message to send in each handshake; its ``stream`` is replaced.
        token: token of the run.
    """

    def __init__(self, poller: Poller, network: Network, address: str, index: int, hello: Hello, token: str):
        self._poller, self._network, self._address = poller, network, address
        self._index, self._hello, self._token = index, hello, token
        self._lock = threading.Lock()
        self._dialled: list[socket.socket | OSError] = []
        self._is_over = False
        self._calls: list[_Call] = []

    def start(self, streams: int, limit_s: float) -> None:
        """Start to dial ``streams`` connections (including the control connection), each within ``limit_s`` seconds."""
        threading.Thread(target=self._dial, args=(streams, limit_s), name="ft-ring-dial", daemon=True).start()

    def tend(self) -> None:
        """Start the handshake on connections that were dialled since the last call.

        Raises:
            Broken: the neighbour cannot be reached.
            ReplaceNodeError: this node cannot connect to any other.
        """
        with self._lock:
            dialled, self._dialled = self._dialled, []
        for connection in dialled:
            if isinstance(connection, OSError):
                raise self._failed(connection)
            connection.setblocking(False)
            call = _Call(connection, replace(self._hello, stream=len(self._calls)), self._token)
            self._calls.append(call)
            self._poller.watch(connection.fileno(), READ, lambda call=call: self._hear(call))

    def taken(self, streams: int) -> list[socket.socket] | None:
        """Return all connections once the neighbour has accepted them, else None. The caller then owns them."""
        if len(self._calls) < streams or not all(call.is_taken for call in self._calls):
            return None
        connections, self._calls = [call.connection for call in self._calls], []
        return connections

    def close(self, why: Broken | None) -> None:
        """Close the connections that were not handed over, and send the neighbour the reason ``why``. The dialing
        thread ends by itself.
        """
        with self._lock:
            self._is_over = True
            dialled, self._dialled = self._dialled, []
        for connection in dialled:
            if not isinstance(connection, OSError):
                connection.close()
        for call in self._calls:
            self._poller.forget(call.connection.fileno())
            if call.is_taken and call.hello.stream == 0 and why is not None:
                Control(call.connection).say(Message(BREAK, suspect=why.suspect, reason=why.reason))
            call.connection.close()
        self._calls = []

    def _dial(self, streams: int, limit_s: float) -> None:
        for _ in range(streams):
            try:
                connection: socket.socket | OSError = self._network.dial(self._address, limit_s)
            except OSError as error:
                connection = error
            with self._lock:
                if self._is_over:
                    if not isinstance(connection, OSError):
                        connection.close()
                    return
                self._dialled.append(connection)
                self._poller.wake()
            if isinstance(connection, OSError):
                return

    def _hear(self, call: _Call) -> None:
        try:
            said = call.connection.recv(call.wanted - len(call.said))
        except BlockingIOError:
            return
        except OSError as error:
            raise self._failed(error) from error
        if not said:
            raise Broken(f"{self._name()} hung up: it is no member of this run, or has just ended", self._index)
        call.said += said
        if call.wanted == GREETING_BYTES and not call.party.may_begin(call.said):
            raise Broken(
                f"{self._name()} does not speak the ring's protocol: another process has that port", self._index
            )
        if len(call.said) < call.wanted:
            return
        if call.wanted == GREETING_BYTES:
            self._introduce(call)
        else:
            self._understand(call)

    def _introduce(self, call: _Call) -> None:
        try:
            call.theirs = call.party.read_greeting(bytes(call.said))
            call.connection.send(write_hello(call.party, call.theirs, call.hello))
        except OSError as error:
            raise self._failed(error) from error
        call.said, call.wanted = bytearray(), ANSWER_BYTES

    def _understand(self, call: _Call) -> None:
        answer = read_answer(call.party, call.theirs, bytes(call.said))
        if answer is None:
            raise Broken(f"{self._name()} is no member of this run", self._index)
        if answer.verdict != TAKEN:
            why = f"{self._name()} {WHY.get(answer.verdict, 'refuses')}; its quorum is {answer.number}"
            raise Broken(why, answer.suspect)
        self._poller.forget(call.connection.fileno())
        call.is_taken = True

    def _failed(self, error: OSError) -> Exception:
        if error.errno in _LOCAL:
            return ReplaceNodeError(f"no connection to {self._name()}: {error.strerror}")
        return Broken(f"{self._name()} cannot be reached: {error.strerror or error}", self._index)

    def _name(self) -> str:
        return f"the right neighbour, member {self._index} at {self._address},"
