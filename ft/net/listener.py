"""Accepts framed channels, with bounded resources: each in a thread of its own, or all in one thread that never blocks.

:mod:`ft.net.framed` describes what the other ends, the dialers, send. Whoever connects has to prove within
:data:`HELLO_S` seconds that it belongs to the run, however slowly its bytes arrive. Until then its connection is the
first to be closed when there are too many, or when this process has no free file descriptor.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ft.net.framed import BadFrame, FramedChannel, ReceivedMessage, Stream
from ft.net.handshake import HandshakeRefused, NotAMember
from ft.net.streams import Network

HELLO_S = 5.0
MAX_CONNECTIONS = 128
_OUT_OF_DESCRIPTORS_S = 0.1
_NOTES_S, _MAX_NOTES = 60.0, 20
_NICENESS = 10


class _Notes:
    """Prints on standard error why connections were refused, at a limited rate, so that no log fills a disk."""

    def __init__(self, name: str):
        self._name, self._noted, self._lock = name, deque[float](), threading.Lock()

    def tell(self, what: str) -> None:
        now = time.monotonic()
        with self._lock:
            while self._noted and now - self._noted[0] > _NOTES_S:
                self._noted.popleft()
            if len(self._noted) >= _MAX_NOTES:
                return
            self._noted.append(now)
        with contextlib.suppress(OSError, ValueError):
            print(f"{self._name}: {what}", file=sys.stderr, flush=True)


class Listener:
    """Listens from its construction until :meth:`close`.

    Args:
        serve: called as serve(channel, address of the peer) in the connection's thread; returns or raises when the
            connection has ended.
        is_background: whether the threads of the connections have a low scheduling priority, so that training has
            priority where CPU cores are scarce.

    Attributes:
        address: address at which others reach this process, in the format of the network.

    Raises:
        OSError: the network cannot listen at this address.
    """

    def __init__(
        self,
        network: Network,
        token: str,
        purpose: str,
        serve: Callable[[FramedChannel, str], None],
        *,
        name: str,
        is_background: bool = False,
    ):
        self._token, self._purpose, self._serve = token, purpose, serve
        self._name, self._is_background = name, is_background
        self._lock = threading.Lock()
        self._channels: dict[FramedChannel, bool] = {}  # value: whether the peer has authenticated
        self._threads: set[threading.Thread] = set()
        self._notes = _Notes(name)
        self._closed = False
        self._socket, self.address = network.listen()
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections and threads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._acceptor.join()
        self._socket.close()
        with self._lock:
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.shutdown()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_OUT_OF_DESCRIPTORS_S)  # retry when other connections have been closed
                continue
            peer = "{}:{}".format(*address[:2]) if isinstance(address, tuple) else "a process of this node"
            with self._lock:
                if self._closed or not self._has_room() or not self._begin(connection, peer):
                    connection.close()

    def _begin(self, connection: socket.socket, peer: str) -> bool:
        """Serve a connection in a new thread, and return whether that was possible. Called with the lock held."""
        try:
            channel = FramedChannel(connection, HELLO_S)
            thread = threading.Thread(target=self._attend, args=(channel, peer), name=self._name, daemon=True)
            thread.start()
        except (OSError, RuntimeError):  # the peer is gone already, or no thread can be started
            return False
        self._channels[channel] = False
        self._threads.add(thread)
        return True

    def _attend(self, channel: FramedChannel, peer: str) -> None:
        if self._is_background:
            _step_back()
        try:
            channel.accept(self._token, self._purpose, HELLO_S)
            with self._lock:
                self._channels[channel] = True
            self._serve(channel, peer)
        except (BadFrame, HandshakeRefused, NotAMember) as error:
            self._notes.tell(f"refused {peer}: {str(error)[:200]!a}")
        except OSError:
            pass  # the peer is gone or too slow, and reports the failure of its own operation
        except Exception as error:
            self._notes.tell(f"a request from {peer} failed: {error!r}")
        finally:
            with self._lock:
                self._channels.pop(channel, None)
                self._threads.discard(threading.current_thread())
            channel.close()

    def _has_room(self) -> bool:
        if len(self._channels) < MAX_CONNECTIONS:
            return True
        unknown = next((channel for channel, is_known in self._channels.items() if not is_known), None)
        if unknown is None:
            return False
        del self._channels[unknown]
        unknown.shutdown()
        return True


def _step_back() -> None:
    """Lower the scheduling priority of this thread only (Linux has one priority for each thread)."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # not permitted here; the lower priority is only an optimization
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


MOST_STRANGERS = 128
_FULL_S = 0.1


class Acceptor:
    """The listening socket of one protocol and all connections to it. Only one thread may use it.

    Args:
        listener: listening socket; the acceptor owns it from now on.
        purpose: name and version of the protocol, at most 16 ASCII characters.
    """

    def __init__(self, listener: socket.socket, token: str, purpose: str, name: str):
        self._listener, self._token, self._purpose = listener, token, purpose
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[Stream, None] = {}  # oldest first
        self._gone: list[Stream] = []
        self._accepts_from = 0.0
        self._notes = _Notes(name)

    def turn(self, wait_s: float | None) -> tuple[list[tuple[Stream, ReceivedMessage]], list[Stream]]:
        """Wait for messages for at most ``wait_s`` seconds (None: until there is one), and serve the connections.

        Returns:
            The messages that have arrived, each with its sender, and the members that are gone.
        """
        messages: list[tuple[Stream, ReceivedMessage]] = []
        for key, mask in self._selector.select(self._patience(wait_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif not key.data.is_closed:
                messages += [(key.data, message) for message in self._serve(key.data, mask)]
        self._tend(time.monotonic())
        gone, self._gone = self._gone, []
        return messages, gone

    def answer(
        self, peer: Stream, kind: bytes, words: dict[str, Any] | None = None, bodies: Sequence[bytes] = ()
    ) -> None:
        """Send a message to a member; do nothing if it is gone."""
        if peer.is_closed:
            return
        try:
            peer.send(kind, words, bodies)
            self._watch(peer)
        except OSError as error:
            self._close(peer, str(error))

    def drop(self, peer: Stream) -> None:
        """Close a connection, which ``turn`` then does not return as gone."""
        if not peer.is_closed:
            self._close(peer, "")
        if peer in self._gone:
            self._gone.remove(peer)

    def wake(self) -> None:
        """Make ``turn`` return in the thread that is in it, and listen no more. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the listening socket and all connections."""
        for key in list(self._selector.get_map().values()):
            held: Any = key.fileobj
            held.close()
        self._selector.close()

    def _patience(self, wait_s: float | None) -> float | None:
        if self._gone:
            return 0.0
        due = HELLO_S if self._strangers else None
        if self._accepts_from:
            due = _FULL_S
        return min((limit for limit in (wait_s, due) if limit is not None), default=None)

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file descriptor is free, or a caller has given up
                if not self._strangers:
                    self._pause()
                    return
                self._close(next(iter(self._strangers)), "no file descriptor is free")
                continue
            try:
                peer = Stream(connection, self._token, self._purpose, is_dialer=False, address=f"{host}:{port}")
                peer.flush()
            except OSError:  # it is gone already
                connection.close()
                continue
            self._strangers[peer] = None
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
            if len(self._strangers) > MOST_STRANGERS:
                self._close(next(iter(self._strangers)), "too many connections without proof")

    def _pause(self) -> None:
        """Leave callers in the listen queue for a moment: the selector would otherwise report them without pause."""
        self._selector.unregister(self._listener)
        self._accepts_from = time.monotonic() + _FULL_S

    def _tend(self, now: float) -> None:
        for peer in [peer for peer in self._strangers if now - peer.since > HELLO_S]:
            self._close(peer, f"no proof within {HELLO_S:.0f} s")
        if self._accepts_from and now >= self._accepts_from:
            self._accepts_from = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _serve(self, peer: Stream, mask: int) -> list[ReceivedMessage]:
        messages = []
        try:
            if mask & selectors.EVENT_WRITE:
                peer.flush()
            if mask & selectors.EVENT_READ:
                messages = peer.receive()
                if peer.is_member:
                    self._strangers.pop(peer, None)
            self._watch(peer)
        except (OSError, BadFrame) as error:
            self._close(peer, str(error))
        return messages

    def _watch(self, peer: Stream) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.has_unsent else 0)
        if self._selector.get_key(peer.socket).events != wanted:
            self._selector.modify(peer.socket, wanted, peer)

    def _close(self, peer: Stream, why: str) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.is_closed = True
        self._strangers.pop(peer, None)
        if peer.is_member:
            self._gone.append(peer)
        else:
            self._notes.tell(ascii(f"refused {peer.address}: {why}"))
