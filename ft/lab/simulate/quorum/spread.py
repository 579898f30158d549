"""Broadcast from a replica's leader to all its ranks, through a tree of relays.

The leader is the rank of a replica (a full copy of the model) that talks to the quorum server. In the trainer, the
message goes over ``ft.state.groups.tree``, whose inner ranks relay it to up to ``FAN_OUT`` ranks each. A machine does
not hold the processes of 98,304 ranks, so here each inner rank is a relay of an event loop with a TCP connection to the
one above, in a tree of the same shape, and the ranks below it that relay nothing are not processes of their own. The
tree of a replica with 8192 ranks has 512 relays.
"""

import asyncio
import socket
from collections.abc import Callable

from ft.base.errors import FtError
from ft.job.quorum import wire
from ft.job.quorum.wire import Broken, Channel

_DIAL_S = 10.0
"""Limit for a connection to the parent, in seconds."""


class Relay:
    """One node of the tree.

    All its methods and callbacks run in the thread of the event loop, which may serve any number of relays.

    Args:
        loop: asyncio event loop that supports readers and writers.
        token: token of the run.
        deliver: called with the body of every message from the parent, after it was forwarded.
        lost: called with the reason when the connection to the parent or to a child broke: the replica has lost a node,
            which its own recovery has to handle.

    Attributes:
        children: number of children that have connected and authenticated.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        token: str,
        deliver: Callable[[bytes], None],
        lost: Callable[[str], None],
    ):
        self._loop, self._token, self._deliver, self._lost = loop, token, deliver, lost
        self._listener: socket.socket | None = None
        self._above: Channel | None = None
        self._below: list[Channel] = []
        self.children = 0

    def listen(self, host: str, backlog: int = 1024) -> str:
        """Listen for children; return the address, "tcp://HOST:PORT", that they give to :meth:`join`."""
        self._listener = socket.create_server((host, 0), backlog=backlog)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        return f"tcp://{host}:{self._listener.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Become a child of the relay at ``address``; block until connected.

        Raises:
            OSError: the relay cannot be reached within 10 s.
        """
        own = socket.create_connection(wire.parse_where(address), timeout=_DIAL_S)
        self._above = Channel(own, self._token, is_host=False)
        self._loop.add_reader(self._above, self._from_above, self._above)

    def publish(self, message: dict) -> None:
        """Send a message down the tree from its root, and deliver it to this node's ranks, too."""
        frame = wire.pack(message)
        self._pass_on(frame)
        self._deliver(frame[wire.HEAD_SIZE :])

    def close(self) -> None:
        """Close all connections of this node."""
        for channel in [*self._below, *([self._above] if self._above is not None else [])]:
            self._forget(channel)
        self._below, self._above = [], None
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        try:
            own, _ = self._listener.accept()
        except OSError:
            return
        try:
            channel = Channel(own, self._token, is_host=True)
        except (FtError, OSError):  # the peer has closed it already
            own.close()
            return
        self._below.append(channel)
        self._loop.add_reader(channel, self._from_below, channel)

    def _from_above(self, channel: Channel) -> None:
        try:
            for body in channel.read():
                if self._below:
                    self._pass_on(wire.wrap(body))
                self._deliver(body)
        except FtError as error:
            self._drop(channel, f"the relay above: {error}")

    def _from_below(self, channel: Channel) -> None:
        was_known = channel.is_known
        try:
            for _ in channel.read():
                raise Broken("nothing is said upwards")
            self.children += channel.is_known and not was_known
        except FtError as error:
            self._drop(channel, f"a relay below: {error}")

    def _pass_on(self, frame: bytes) -> None:
        for channel in list(self._below):
            if channel.is_known:
                self._send(channel, frame)

    def _send(self, channel: Channel, frame: bytes) -> None:
        try:
            channel.send(frame)
            if channel.wants_write:
                self._loop.add_writer(channel, self._flush, channel)
        except FtError as error:
            self._drop(channel, f"a relay below: {error}")

    def _flush(self, channel: Channel) -> None:
        try:
            channel.flush()
            if not channel.wants_write:
                self._loop.remove_writer(channel)
        except FtError as error:
            self._drop(channel, f"a relay below: {error}")

    def _drop(self, channel: Channel, reason: str) -> None:
        is_stranger = channel is not self._above and not channel.is_known
        self._forget(channel)
        if channel is self._above:
            self._above = None
        else:
            self._below.remove(channel)
            self.children -= not is_stranger
        if not is_stranger:
            self._lost(reason)

    def _forget(self, channel: Channel) -> None:
        if channel.fileno() >= 0:
            self._loop.remove_reader(channel)
            self._loop.remove_writer(channel)
            channel.close()
