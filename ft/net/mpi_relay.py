"""The relay: the MPI process of a node, which relays byte streams between the node's workers and those of other nodes.

Workers are training processes; they are not MPI processes themselves (:mod:`ft.net.mpi` gives the reasons) and connect
to the relay over Unix sockets. The relay has one thread with one event loop that never blocks on a worker. MPI offers
no file descriptor to wait on, so the relay polls MPI: continuously while data moves, a thousand times a second
otherwise. If MPI blocks an operation for ever, the deadlines of the workers' connections and MPI's failure detector
(:mod:`ft.net.mpi_world`) end it.

``python -m ft.net.mpi_relay FOLDER`` under mpirun relays until SIGTERM, for workers that were started without ``ft
run``. Workers connect to it in the folder FOLDER/RANK.
"""

import contextlib
import itertools
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ft.net import mpi, mpi_world
from ft.net.mpi_streams import OPEN, OPENED, RESET, Key, Stream, other, pack, unpack
from ft.net.mpi_world import World
from ft.platform import processes

_HOT_S, _PAUSE_S = 0.002, 0.001
_MAX_STREAMS = 1024
_LEAVE_S = 5.0


def listen(folder: Path) -> socket.socket:
    """Return the socket that this node's workers connect to.

    The socket is created before MPI starts, so that every worker finds it.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / mpi.RELAY))
    listener.listen(128)
    listener.setblocking(False)
    return listener


class Relay:
    """The event loop that relays streams between this node's workers and the relays of other nodes.

    Args:
        folder: folder with the Unix sockets of ``listener`` and of this node's workers.
        listener: socket for this node's workers.
    """

    def __init__(self, world: World, folder: Path, listener: socket.socket):
        self._world, self._folder, self._listener = world, folder, listener
        self._generation = world.generation
        self._numbers = itertools.count()
        self._streams: dict[Key, Stream] = {}
        self._selector = selectors.DefaultSelector()
        self._watched: dict[Key, int] = {}
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._hot_until = 0.0

    def run(self, ended: Callable[[], bool]) -> None:
        """Relay until ``ended()``, which is called in every iteration of the loop, returns True."""
        while not ended():
            pause = 0.0 if time.monotonic() < self._hot_until else _PAUSE_S
            events = self._selector.select(pause)
            for key, mask in events:
                key.data(mask)
            frames = self._world.receive()
            if self._world.generation != self._generation:
                self._begin_again()
            for source, frame in frames:
                self._take(source, frame)
            if events or frames:
                self._hot_until = time.monotonic() + _HOT_S

    # --- workers -----------------------------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        with contextlib.suppress(OSError):  # out of file descriptors, until some of those in use are closed
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, lambda _: self._greet(connection))

    def _greet(self, connection: socket.socket) -> None:
        """Read a worker's request, which is one line, and serve it. The worker writes the line in one piece."""
        self._selector.unregister(connection)
        try:
            words = connection.recv(256).decode().split()
        except (OSError, UnicodeDecodeError):
            words = []
        if len(words) == 3 and words[0] == "dial" and words[1].isdecimal():
            self._dial(connection, int(words[1]), words[2])
            return
        if words == ["ping"]:
            with contextlib.suppress(OSError):
                connection.send(b"+")
        connection.close()

    def _dial(self, connection: socket.socket, peer: int, name: str) -> None:
        key = (self._world.rank, next(self._numbers), True)
        stream = self._streams[key] = Stream(key, peer, connection, self._world.send)
        if peer not in self._world.members:
            stream.fail(f"the MPI process of node {peer} is gone".encode())
        elif len(self._streams) > _MAX_STREAMS:
            stream.fail(b"too many connections")
        else:
            self._world.send(peer, pack(OPEN, other(key), rest=name.encode()))
        self._watch(stream)

    def _serve(self, stream: Stream, mask: int) -> None:
        if stream.over:
            return
        if mask & selectors.EVENT_WRITE:
            stream.push()
        if mask & selectors.EVENT_READ:
            stream.pull()
        self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        """Register the stream's next operations with the selector, or close a stream that is over."""
        key, wanted = stream.key, 0
        if not stream.over:
            wanted = selectors.EVENT_READ * stream.reads | selectors.EVENT_WRITE * bool(stream.out)
        watched = self._watched.pop(key, 0)
        if wanted != watched:
            if watched:
                self._selector.unregister(stream.sock)
            if wanted:
                self._selector.register(stream.sock, wanted, lambda mask: self._serve(stream, mask))
        if wanted:
            self._watched[key] = wanted
        if stream.over and self._streams.pop(key, None) is not None:
            stream.sock.close()

    # --- other relays ------------------------------------------------------------------------------------------------

    def _take(self, source: int, frame: memoryview) -> None:
        try:
            kind, key, number, rest = unpack(frame)
        except struct.error:
            return
        stream = self._streams.get(key)
        if kind == OPEN and stream is None and not key[2]:
            self._open(source, key, bytes(rest).decode(errors="replace"))
        elif stream is not None and stream.peer == source:
            stream.take(kind, number, rest)
            self._watch(stream)

    def _open(self, source: int, key: Key, name: str) -> None:
        connection = None
        try:
            if not mpi.is_name(name):
                raise ConnectionRefusedError("no worker has such a name")
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            connection.connect(str(self._folder / name))
        except OSError as error:
            if connection is not None:
                connection.close()
            self._world.send(source, pack(RESET, other(key), rest=f"no worker listens there: {error}".encode()))
            return
        stream = self._streams[key] = Stream(key, source, connection, self._world.send, is_open=True)
        self._world.send(source, pack(OPENED, other(key)))
        self._watch(stream)

    def _begin_again(self) -> None:
        """After the death of an MPI process, fail all streams; the workers then reconnect.

        Streams between survivors fail too, because frames on their way are lost with the old communicator.
        """
        self._generation = self._world.generation
        for stream in list(self._streams.values()):
            stream.fail(b"an MPI process has died; the others have regrouped")
            self._watch(stream)


def main() -> None:
    """Run a relay as ``python -m ft.net.mpi_relay FOLDER`` until SIGTERM."""
    ended: list[int] = []
    processes.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda signum, _: ended.append(signum))
    mpi_world.configure(os.environ)
    rank, _ = mpi_world.rank_in(os.environ)
    folder = Path(sys.argv[1]) / str(rank)
    folder.mkdir(parents=True)
    (folder / "pid").write_text(str(os.getpid()))
    listener = listen(folder)
    world = World()
    Relay(world, folder, listener).run(lambda: bool(ended))
    world.leave(_LEAVE_S)
    os._exit(0)


if __name__ == "__main__":
    main()
