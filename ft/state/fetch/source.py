"""The connection of a fetching rank to one source of state."""

import contextlib
import http.client
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from ft.net.handshake import Party, parse_challenge
from ft.state.fetch import wire
from ft.state.fetch.memory import FlatState
from ft.state.fetch.shares import Piece
from ft.state.snapshot.layout import BadTable, Table, checksum

_PERIOD_S = 0.02


class Gone(Exception):
    """The source no longer holds the state."""


class Lost(Exception):
    """No process of this run answers at the address, or it has stopped answering."""


class Bad(Exception):
    """The source's answer or data is not the requested state."""


class Damaged(Bad):
    """A block does not match its checksum."""


@dataclass(frozen=True)
class Wanted:
    """The state to fetch.

    Attributes:
        step: the state is that at the end of this committed step.
        lineage: number of the quorum in which the step was committed.
        rank: logical rank that must serve the state; None: any.
    """

    step: int
    lineage: int
    rank: int | None = None

    def __str__(self):
        return f"step {self.step}, lineage {self.lineage}"


class Source:
    """One connection to a source, used by one thread; :meth:`cut` ends it from another thread.

    Args:
        address: "host:port" of the source.
        token: token of the run.
        patience_s: maximum seconds for a connection, an answer or a block.

    Attributes:
        since: time.monotonic() of the last progress, None while no progress is expected of the source.
    """

    def __init__(self, address: str, token: str, patience_s: float):
        self.address = address
        self.since: float | None = None
        self._patience = patience_s
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None  # kept here, since HTTPConnection drops it after the last answer
        self._response: http.client.HTTPResponse | None = None
        self._cut: str | None = None
        self._party, self._nonce, self._count = Party(token, wire.PURPOSE, is_dialer=True), b"", 0
        self._scratch: memoryview | None = None

    def open(self) -> None:
        """Connect, and receive the source's challenge, which all proofs cover.

        Raises:
            Lost: no server at the address uses this protocol.
        """
        with self._failures():
            self.since = time.monotonic()
            try:
                connection = http.client.HTTPConnection(self.address, timeout=self._patience)
                connection.connect()
            except http.client.InvalidURL as error:
                raise Lost(f"{self.address!r} is no address: {error}") from error
            connection.auto_open = 0  # no reconnecting: the challenge belongs to this connection
            with self._lock:
                self._connection, self._socket = connection, connection.sock
                if self._cut is not None:
                    raise Lost(self._cut)
            connection.request("GET", "/", headers={"Accept-Encoding": "identity"})
            response = self._answer()
            scheme, _, nonce = response.getheader("WWW-Authenticate", "").partition(" ")
            challenge = parse_challenge(nonce)
            if response.status != 401 or scheme != wire.SCHEME or challenge is None:
                raise Lost(f"answers {response.status}: no server of a state")
            self._take(response, response.length or 0, 1 << 10)
            self._nonce = challenge
            self._socket.settimeout(None)  # from here on ``cut`` ends a stalled connection, without system calls
            self.since = time.monotonic()

    def state(self, wanted: Wanted, table: Table) -> str:
        """Wait until the source holds the wanted state, and return its encoded envelope if its tensors match ``table``.

        The source keeps its state for this connection from then on.

        Raises:
            Gone: the source does not hold that state any more, or does not reach it in time.
            Lost: the connection failed, or the peer does not belong to the run.
            Bad: the source holds something else.
        """
        answer = self._when_held(wire.state_target(wanted.step, wanted.lineage), wanted.step)
        with self._failures():
            theirs = answer["table"].encode()
            if theirs != table.encoded:
                difference = Table.decode(theirs).difference(table)
                raise Bad(f"has other tensors than this rank: {difference}")
            said = {key: answer[key] for key in ("step", "lineage", "bytes", "digest")}
            expected = {"step": wanted.step, "lineage": wanted.lineage, "bytes": table.nbytes, "digest": table.digest}
            if said != expected:
                raise Bad(f"answers with {said} instead of {expected}")
            if wanted.rank is not None and answer["rank"] != wanted.rank:
                raise Bad(f"serves logical rank {answer['rank']} of replica {answer['replica']}, not {wanted.rank}")
            return answer["envelope"]

    def envelope(self, wanted: Wanted) -> str:
        """Return the encoded envelope alone. This raises the same exceptions as :meth:`state`."""
        answer = self._when_held(wire.envelope_target(wanted.step, wanted.lineage), wanted.step)
        with self._failures():
            return answer["envelope"]

    def receive(self, wanted: Wanted, piece: Piece, into: FlatState) -> None:
        """Receive the byte range ``piece`` into ``into``.

        Raises:
            Damaged: a block does not match its checksum; the connection remains usable.
            Gone: see :meth:`state`.
            Lost: see :meth:`state`.
            Bad: see :meth:`state`.
        """
        target = wire.bytes_target(wanted.step, wanted.lineage, into.table.digest, piece.start, piece.stop)
        with self._failures():
            response, words = self._ask(target)
            if response.status != 200:
                self._refusal(response, words)
            if response.length != wire.stream_length(piece.start, piece.stop):
                raise Bad(f"announces {response.length} bytes for {len(piece)} bytes of state")
            head, checksums, damaged = memoryview(bytearray(wire.HEAD.size)), [], None
            for start in range(piece.start, piece.stop, wire.BLOCK):
                stop = min(start + wire.BLOCK, piece.stop)
                self._fill(response, head)
                tag, value = wire.HEAD.unpack(head)
                if tag != wire.BLOCK_TAG:
                    self._end(response, words, checksums, tag)
                if not self._block(response, into, start, stop, value) and damaged is None:
                    damaged = start
                checksums.append(value)
                self.since = time.monotonic()
            self._fill(response, head)
            self._end(response, words, checksums, wire.HEAD.unpack(head)[0])
            if damaged is not None:
                raise Damaged(f"the block at byte {damaged} does not have its checksum")

    def cut(self, reason: str) -> None:
        """Abort any use of the connection: its thread gets Lost(reason). May be called from any thread."""
        with self._lock:
            if self._cut is None:
                self._cut = reason
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the source may have closed it already
                    self._socket.shutdown(socket.SHUT_RDWR)

    def is_connected(self) -> bool:
        with self._lock:
            return self._socket is not None

    def close(self) -> None:
        """Close the connection. Only the thread that uses it may call this."""
        self.since = None
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._response is not None:
                self._response.close()

    def _when_held(self, target: str, step: int) -> dict[str, Any]:
        """Return the answer to ``target``; poll while the source has not reached the end of ``step`` yet."""
        until = time.monotonic() + self._patience
        while True:
            with self._failures():
                response, words = self._ask(target)
                if response.status == 200:
                    return self._json(response, words)
                newest = self._not_held(response, words)
                if newest.get("newest") is not None and not newest["newest"] < step:
                    raise Gone(newest["reason"])
                if time.monotonic() > until or self._cut is not None:
                    raise Gone(f"has not come to the end of step {step} in time: {newest['reason']}")
            time.sleep(_PERIOD_S)

    def _ask(self, target: str) -> tuple[http.client.HTTPResponse, tuple]:
        self.since = time.monotonic()
        self._count += 1
        words = (self._count, target)
        proof = self._party.answer(self._nonce, *words).hex()
        authorization = f"{wire.SCHEME} {self._party.challenge.hex()} {self._count} {proof}"
        self._connection.request("GET", target, headers={"Authorization": authorization})
        return self._answer(), words

    def _answer(self) -> http.client.HTTPResponse:
        self._response = self._connection.getresponse()
        return self._response

    def _refusal(self, response: http.client.HTTPResponse, words: tuple) -> None:
        raise Gone(self._not_held(response, words)["reason"])

    def _not_held(self, response: http.client.HTTPResponse, words: tuple) -> dict[str, Any]:
        if response.status == 401:
            raise Lost("has another token: it does not belong to this run")
        if response.status != wire.NOT_HELD:
            raise Lost(f"answers {response.status}")
        return self._json(response, words)

    def _json(self, response: http.client.HTTPResponse, words: tuple) -> dict[str, Any]:
        body = self._take(response, response.length, wire.MAX_JSON)
        given = bytes.fromhex(response.getheader(wire.PROOF_HEADER, ""))
        if not self._party.check(given, self._nonce, *words, response.status, bytes(body)):
            raise Lost("gives no proof that it belongs to this run")
        return wire.decode(bytes(body))

    def _take(self, response: http.client.HTTPResponse, length: int | None, limit: int) -> bytearray:
        if length is None or not 0 <= length <= limit:
            raise Bad(f"an answer of {length} bytes; at most {limit} are taken")
        data = bytearray()
        while len(data) < length:  # allocate for bytes received, not for bytes announced
            piece = bytearray(min(wire.BLOCK, length - len(data)))
            self._fill(response, memoryview(piece))
            data += piece
        response.read()  # reads nothing, but marks the answer as complete
        return data

    def _block(self, response: http.client.HTTPResponse, into: FlatState, start: int, stop: int, value: int) -> bool:
        """Receive the next block; return whether it matches its checksum."""
        place = into.whole(start, stop)
        if place is not None:
            self._fill(response, place)
            return checksum(place) == value
        if self._scratch is None:
            self._scratch = memoryview(bytearray(wire.BLOCK))
        scratch = self._scratch[: stop - start]
        self._fill(response, scratch)
        if checksum(scratch) != value:
            return False
        into.scatter(start, stop, scratch)
        return True

    def _end(self, response: http.client.HTTPResponse, words: tuple, checksums: list[int], tag: bytes) -> None:
        """Process the end of a stream; return only if its proof confirms all received blocks."""
        if tag not in (wire.END_TAG, wire.GONE_TAG):
            raise Bad(f"sends {tag!r} in place of a block")
        given = memoryview(bytearray(wire.PROOF_BYTES))
        self._fill(response, given)
        if not self._party.check(bytes(given), self._nonce, *words, tag, *checksums):
            raise Damaged("the end of the stream does not fit what came before it")
        if tag == wire.GONE_TAG:
            raise Gone("the state was withdrawn during the fetch")
        if response.length:
            raise Bad("more than it announced")
        response.read()

    def _fill(self, response: http.client.HTTPResponse, view: memoryview) -> None:
        while view:
            got = response.readinto(view)
            if not got:
                raise Lost("the connection ended early")
            view = view[got:]

    @contextlib.contextmanager
    def _failures(self):
        """Translate the errors of a connection into this module's exceptions."""
        try:
            yield
        except Gone:
            raise
        except (Lost, Bad) as error:
            if self._cut is not None:
                raise Lost(self._cut) from error
            raise
        except (OSError, http.client.HTTPException) as error:
            raise Lost(self._cut or f"{type(error).__name__}: {error}") from error
        except (BadTable, ValueError, KeyError, TypeError, AttributeError) as error:
            # http.client raises AttributeError if the socket is shut down while http.client closes it
            raise (Lost(self._cut) if self._cut else Bad(f"an answer that makes no sense: {error!r}")) from error
