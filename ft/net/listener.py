"""Accepts the connections of framed channels, and serves each in a thread of its own, with bounded resources.

A peer has to prove within :data:`HELLO_S` seconds that it belongs to the run, however slowly its bytes arrive. Peers
that have not done so yet are the first to be disconnected when there are too many connections.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from ft.net.framed import BadFrame, FramedChannel
from ft.net.handshake import NotAMember, Refused
from ft.net.streams import Network

HELLO_S = 5.0
MAX_CONNECTIONS = 128
_OUT_OF_DESCRIPTORS_S = 0.1
_NOTES_S, _MAX_NOTES = 60.0, 20
_NICENESS = 10


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
        self._noted: deque[float] = deque()
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
        except (BadFrame, Refused, NotAMember) as error:
            self._note(f"refused {peer}: {str(error)[:200]!a}")
        except OSError:
            pass  # the peer is gone or too slow, and reports the failure of its own operation
        except Exception as error:
            self._note(f"a request from {peer} failed: {error!r}")
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

    def _note(self, what: str) -> None:
        """Print ``what``, at a limited rate, so that unauthenticated peers cannot fill the log."""
        now = time.monotonic()
        with self._lock:
            while self._noted and now - self._noted[0] > _NOTES_S:
                self._noted.popleft()
            if len(self._noted) >= _MAX_NOTES:
                return
            self._noted.append(now)
        print(f"{self._name}: {what}", file=sys.stderr, flush=True)


def _step_back() -> None:
    """Lower the scheduling priority of this thread only (Linux has one priority for each thread)."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # not permitted here; the lower priority is only an optimization
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
