"""HTTP request handler of a state server: authenticates a peer and sends it this rank's training state.

The peer is the same rank of another replica (a full copy of the model) that is behind and fetches the state (FT-HSDP,
section 4.3). The envelope of a state is everything but the tensors, as JSON. A state is identified by its step and its
lineage, the number of the quorum in which that step was committed. :mod:`ft.state.fetch.wire` describes the protocol.
"""

import contextlib
import io
import os
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ft.net.handshake import Party, parse_challenge
from ft.state.fetch import wire
from ft.state.fetch.listener import HELLO_S, Deadline, Listener
from ft.state.fetch.offer import NotHeld, Offer, Shelf, Visit, Withdrawn
from ft.state.snapshot.layout import FORMAT, checksum

IDLE_S = 60.0
"""Maximum seconds between two requests of an authenticated peer, which also fetches from other replicas meanwhile."""
BLOCK_S = 10.0
"""Maximum seconds for sending one block to an authenticated peer."""
_MAX_STRANGE_REQUESTS = 3


_NICENESS = 10
"""Nice value of the serving threads: training has priority where CPU cores are scarce."""


class BadRequest(ValueError):
    """The request does not conform to the protocol."""


@dataclass(frozen=True)
class Host:
    """Data that all handlers of a server share.

    Attributes:
        shelf: the state that is offered and the newest envelope.
        token: token of the run.
        replica: replica whose state is served.
        rank: logical rank whose state is served.
    """

    shelf: Shelf
    token: str
    replica: int
    rank: int


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "ft-fetch/1", ""
    server: Listener

    def __init__(self, host: Host, connection: socket.socket, address, door: Listener):
        self._host, self._party = host, Party(host.token, wire.PURPOSE, is_dialer=False)
        self._asker = b""  # the peer's challenge
        self._count, self._strange = 0, 0
        self._visit: tuple[Offer, Visit] | None = None
        self._scratch: memoryview | None = None
        super().__init__(connection, address, door)

    def setup(self) -> None:
        _step_back()
        self.connection = self.request
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming = Deadline(self.connection, time.monotonic() + HELLO_S)
        self.rfile = io.BufferedReader(self._incoming)
        self.wfile = io.BytesIO()  # buffers the headers of answers; bodies go to the socket

    def handle_one_request(self) -> None:
        self._incoming.until = time.monotonic() + (IDLE_S if self._count else HELLO_S)
        super().handle_one_request()
        self._push()

    def finish(self) -> None:
        self._leave()
        with contextlib.suppress(OSError):  # sends the answer to an invalid request; the peer may be gone
            self._push()

    def do_GET(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self._refuse(400, "a request with a body")
            return
        if not self._is_member():
            self._challenge()
            return
        self.server.welcome(self.connection)
        address, numbers = urlsplit(self.path), {}
        try:
            numbers = {key: values[-1] for key, values in parse_qs(address.query, max_num_fields=8).items()}
            self._answer(address.path, numbers)
        except NotHeld as refusal:
            self._say(wire.NOT_HELD, {"reason": str(refusal), "newest": refusal.newest})
        except (KeyError, ValueError) as error:
            self._refuse(400, f"no such request: {error}")

    def send_error(self, code, message=None, explain=None) -> None:
        self._refuse(int(code), message or "no request")

    def log_message(self, format, *arguments) -> None:
        """Do nothing: requests are not logged. :meth:`_refuse` logs refused requests."""

    def _answer(self, path: str, numbers: dict[str, str]) -> None:
        step, lineage = int(numbers["step"]), int(numbers["lineage"])
        if path == "/state":
            self._send_state(self._host.shelf.find(step, lineage))
        elif path == "/bytes":
            offer = self._host.shelf.find(step, lineage)
            self._send_bytes(offer, numbers["digest"], int(numbers["start"]), int(numbers["stop"]))
        elif path == "/envelope":
            envelope = self._host.shelf.find_envelope(step, lineage)
            self._say(200, {"step": step, "lineage": lineage, "envelope": envelope.content})
        else:
            self._refuse(404, "no such path")

    def _is_member(self) -> bool:
        scheme, _, rest = self.headers.get("Authorization", "").partition(" ")
        words = rest.split()
        if scheme != wire.SCHEME or len(words) != 3:
            return False
        asker, count, given = parse_challenge(words[0]), words[1], words[2]
        if not (count.isascii() and count.isdecimal() and len(count) < 10 and int(count) > self._count):
            return False
        with contextlib.suppress(ValueError):
            if asker is not None and self._party.check(bytes.fromhex(given), asker, int(count), self.path):
                self._asker, self._count = asker, int(count)
                return True
        return False

    def _prove(self, *said: bytes | int) -> bytes:
        """Return the proof (keyed hash over request and answer) that goes with the answer to the newest request."""
        return self._party.answer(self._asker, self._count, self.path, *said)

    def _challenge(self) -> None:
        self._strange += 1
        if "Authorization" in self.headers:
            self._log("a request without the right proof: it has not the token of this run")
        self.close_connection = self._strange >= _MAX_STRANGE_REQUESTS or "Authorization" in self.headers
        self.send_response(401)
        self.send_header("WWW-Authenticate", f"{wire.SCHEME} {self._party.challenge.hex()}")
        self.send_header("Content-Length", "0")
        self._end_head()

    def _send_state(self, offer: Offer) -> None:
        self._leave()
        visit = offer.visit("{}:{}".format(*self.client_address[:2]))
        self._visit = offer, visit
        head = {"step": offer.step, "lineage": offer.lineage, "replica": self._host.replica, "rank": self._host.rank}
        head |= {"bytes": offer.table.nbytes, "digest": offer.table.digest, "table": offer.table.encoded.decode()}
        self._say(200, head | {"envelope": offer.envelope.content})

    def _send_bytes(self, offer: Offer, digest: str, start: int, stop: int) -> None:
        if digest != offer.table.digest or not 0 <= start < stop <= offer.table.nbytes:
            raise BadRequest(f"bytes {start} to {stop} of a state of {offer.table.nbytes} bytes, digest {digest}")
        if self._visit is None or self._visit[0] is not offer:
            raise Withdrawn("the state that this fetch began with was withdrawn", offer.step)
        visit = self._visit[1]
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(wire.stream_length(start, stop)))
        self._end_head()
        checksums, tag = [], wire.END_TAG
        try:
            for begin in range(start, stop, wire.BLOCK):
                checksums.append(self._send_block(offer, begin, min(begin + wire.BLOCK, stop)))
                visit.sent += min(begin + wire.BLOCK, stop) - begin
        except Withdrawn:
            tag, self.close_connection = wire.GONE_TAG, True
        end = self._prove(tag, *checksums)
        self._deliver(wire.HEAD.pack(tag, 0), end)

    def _send_block(self, offer: Offer, start: int, stop: int) -> int:
        with offer.reading(self.connection) as memory:
            block = memory.whole(start, stop)
            if block is None:
                block = self._scratch_of(stop - start)
                memory.gather(start, stop, block)
            value = checksum(block)
            self._deliver(wire.HEAD.pack(wire.BLOCK_TAG, value), block)
            return value

    def _scratch_of(self, length: int) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(wire.BLOCK))
        return self._scratch[:length]

    def _say(self, status: int, content: dict[str, Any]) -> None:
        """Send a JSON answer with a proof to an authenticated peer."""
        body = wire.encode({"format": FORMAT} | content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header(wire.PROOF_HEADER, self._prove(status, body).hex())
        self._end_head()
        self._deliver(body)

    def _refuse(self, status: int, reason: str) -> None:
        self._log(reason)
        self.close_connection = True
        body = wire.encode({"format": FORMAT, "reason": reason})
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self._end_head()
        self.wfile.write(body)

    def _end_head(self) -> None:
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _deliver(self, *pieces: bytes | memoryview) -> None:
        """Send the buffered headers and ``pieces``, each piece within :data:`BLOCK_S` seconds."""
        head = self.wfile.getvalue()
        self._wind_back()
        self.connection.settimeout(BLOCK_S)
        queue = [piece for piece in (head, *pieces) if len(piece)]
        sent = self.connection.sendmsg(queue)
        for piece in queue:
            if sent < len(piece):
                self.connection.sendall(memoryview(piece)[sent:])
            sent = max(0, sent - len(piece))

    def _push(self) -> None:
        if self.wfile.tell():
            self._deliver()

    def _wind_back(self) -> None:
        self.wfile.seek(0)
        self.wfile.truncate()

    def _leave(self) -> None:
        if self._visit is not None:
            offer, visit = self._visit
            offer.leave(visit)
            self._visit = None

    def _log(self, reason: str) -> None:
        self.server.note(f"refused {self.client_address[0]}: {reason[:200]!a}")


def _step_back() -> None:
    """Lower the scheduling priority of this thread only (Linux has one priority for each thread)."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # not permitted here; the lower priority is only an optimization
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
