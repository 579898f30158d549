"""The relay: the MPI process of a node, which relays byte streams between the node's workers and those of other nodes.

Workers are not MPI processes themselves (:mod:`ft.net.streams` gives the reasons) and connect to the relay over Unix
sockets. The relay has one thread with one event loop that never blocks on a worker. MPI offers no file descriptor to
wait on, so the relay polls MPI: continuously while data moves, a thousand times a second otherwise. If MPI blocks an
operation for ever, the deadlines of the workers' connections and MPI's failure detector end it.

``python -m ft.net.mpi_relay FOLDER`` under mpirun relays until SIGTERM, for workers that were started without ``ft
run``. Workers connect to it in the folder FOLDER/RANK.

Each end of a stream is a relay with a socket to one worker. A frame is a header and, for some kinds, bytes:

    OPEN name    a worker requests a stream to worker ``name``; answered by OPENED, or by RESET with the reason
    DATA bytes   data; at most WINDOW bytes may be sent beyond the bytes that the other end has credited
    CREDIT n     n more bytes were passed on to the worker at this end
    END          end of data: the worker has closed its socket
    RESET why    the stream was aborted

Because of this flow control, a worker that reads slowly or not at all delays only the worker that writes to it, whose
socket becomes full.

The communicator over the relays survives the loss of members (ULFM: revoke, shrink). Frames (messages) between two
members arrive in order. When MPI reports a failed process to some member, that member revokes the communicator, so that
all members are notified. Then all members shrink the communicator, which starts another ``generation``. Frames on their
way at that time are lost, also between survivors, and the relays have to restart their streams.

This has the following requirements with Open MPI 5.0.11 (mpi_facts.txt and mpi_hosts.txt in tools/experiments/results):

* Only the blocking shrink works: on a revoked communicator the test of ``MPIX_Comm_ishrink`` fails with MPI_ERR_INTERN.
The blocking shrink waits for a member that hangs. Open MPI's heartbeat detector solves this: it declares a process dead
for good after ``SILENT_S`` seconds of silence, and that process aborts when it is notified. The detector runs
without a thread of its own, so a heartbeat proves that the event loop of its process runs.
* Deaths must be propagated by Open MPI's own broadcast. By default mpirun's daemons propagate them, which does not
reach all members when a daemon has died with its node; the shrink then waits for ever.
* All connections are made at the start, because later connections would request addresses from those daemons.
* Slurm's mpi/pmix plugin ends the whole job step when Open MPI reports a death to it. So a process started by srun
finalises PMIx once all members are connected; then no death is reported to Slurm.
"""

import contextlib
import ctypes
import itertools
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from ft.base.errors import UserError
from ft.net import streams
from ft.platform import processes

BEAT_S, SILENT_S = 1.0, 10.0
_TAG = 7
_AT_ONCE = 16
_SHARED = 512
_FT_FILE = "share/openmpi/amca-param-sets/ft-mpi"


def configure(environment: MutableMapping[str, str]) -> None:
    """Set the variables that Open MPI reads at its start. Values set by the user are kept.

    Raises:
        UserError: mpirun was started such that it would end the whole job with the first process that dies.
    """
    by_mpirun = "OMPI_COMM_WORLD_RANK" in environment
    if by_mpirun and environment.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("1", "true"):
        raise UserError("mpirun was started without fault tolerance", "start with: mpirun --with-ft ulfm ...")
    settings = {"mpi_ft_enable": "1", "mpi_ft_detector": "1", "mpi_ft_detector_thread": "0"}
    settings |= {"mpi_ft_detector_period": f"{BEAT_S:g}", "mpi_ft_detector_timeout": f"{SILENT_S:g}"}
    settings |= {"mpi_ft_propagator_with_rbcast": "1", "mpi_yield_when_idle": "1"}
    for name, value in settings.items():
        environment.setdefault(f"OMPI_MCA_{name}", value)
    # the wheel's Open MPI looks for this file where it was built, unless mpirun has started it
    if (Path(sys.prefix) / _FT_FILE).exists():
        environment.setdefault("OPAL_PREFIX", sys.prefix)


@dataclass
class _Coming:
    """A frame that MPI is receiving."""

    request: Any
    frame: memoryview


class World:
    """This process's membership in the communicator. Only one thread may use it.

    Attributes:
        rank: this member's rank at the start, which identifies the member also after a shrink.
        size: number of members at the start.
        members: initial ranks of the members that are not known to be dead.
        generation: number of times the communicator was shrunk.
    """

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._mpi = MPI
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
        self._first = MPI.COMM_WORLD
        self.rank, self.size = self._first.Get_rank(), self._first.Get_size()
        self.generation = 0
        self._use(self._first.Dup())
        self._meet_all()
        self._comm.Barrier()
        _forget_shared_memory()
        self._knows_pmix = not is_by_srun(os.environ)
        if not self._knows_pmix:
            _leave_pmix()
        self._coming: dict[int, deque[_Coming]] = {}
        self._going: deque[tuple[Any, Any]] = deque()
        self._of_before: list[tuple[Any, Any]] = []

    def share(self, mine: bytes) -> list[bytes]:
        """Return the bytes ``mine`` of all members, by rank (an all-gather); at most ``_SHARED`` bytes each.

        This is a collective operation, which all members have to call before any other operation.
        """
        everything = bytearray(_SHARED * self.size)
        self._comm.Allgather([mine.ljust(_SHARED, b"\0"), self._mpi.BYTE], [everything, self._mpi.BYTE])
        return [bytes(everything[i * _SHARED : (i + 1) * _SHARED]).rstrip(b"\0") for i in range(self.size)]

    def send(self, to: int, frame: bytes | memoryview) -> None:
        """Start to send ``frame``, which must not change any more, to the member with initial rank ``to``.

        A frame for a rank that is not a member any more is dropped.
        """
        place = self._place_of.get(to)
        if place is None:
            return
        try:
            self._going.append((self._comm.Isend([frame, self._mpi.BYTE], place, _TAG), frame))
        except self._mpi.Exception as error:
            self._failed(error)

    def receive(self) -> list[tuple[int, memoryview]]:
        """Return the received frames as (initial rank of the sender, frame), in order for each sender.

        This also handles deaths of members.
        """
        try:
            self._accept()
            self._flush()
            return self._take()
        except self._mpi.Exception as error:
            self._failed(error)
            return []

    def leave(self, patience_s: float) -> bool:
        """Finalise MPI together with the others, if mpirun has started it.

        Return whether MPI was finalised within ``patience_s`` seconds.
        """
        if not self._knows_pmix:
            return False
        thread = threading.Thread(target=_finalize, daemon=True)
        thread.start()
        thread.join(patience_s)
        return not thread.is_alive()

    def _use(self, comm: Any) -> None:
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        everyone = list(range(comm.Get_size()))
        self._comm = comm
        self.members = comm.Get_group().Translate_ranks(everyone, self._first.Get_group())
        self._place_of = {rank: place for place, rank in enumerate(self.members)}

    def _meet_all(self) -> None:
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            nothing = [bytearray(1), self._mpi.BYTE]
            self._comm.Sendrecv(nothing, to, _TAG, [bytearray(1), self._mpi.BYTE], source, _TAG)

    def _accept(self) -> None:
        """Start to receive announced frames, at most ``_AT_ONCE`` per call, so that sending is not delayed for long."""
        status = self._mpi.Status()
        for _ in range(_AT_ONCE):
            message = self._comm.Improbe(self._mpi.ANY_SOURCE, _TAG, status)
            if message is None:
                return
            frame = room(status.Get_count(self._mpi.BYTE))
            request = message.Irecv([frame, self._mpi.BYTE])
            self._coming.setdefault(status.Get_source(), deque()).append(_Coming(request, frame))

    def _flush(self) -> None:
        self._going = deque((request, frame) for request, frame in self._going if not request.Test())

    def _take(self) -> list[tuple[int, memoryview]]:
        """Return received frames in order: large frames may be completed after small ones that were sent later."""
        found = []
        for place, queue in self._coming.items():
            while queue and queue[0].request.Test():
                found.append((self.members[place], queue.popleft().frame))
        return found

    def _failed(self, error: Any) -> None:
        """Revoke and shrink the communicator after a member has died, or another member has reported a death."""
        mpi = self._mpi
        comm = None
        while comm is None:
            if error.Get_error_class() not in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED):
                raise error
            self._comm.Revoke()
            try:
                comm = self._comm.Shrink()
            except mpi.Exception as another:  # another member has died meanwhile
                error = another
        self._of_before += self._going
        self._of_before += [(each.request, each.frame) for queue in self._coming.values() for each in queue]
        self._going.clear()
        self._coming.clear()
        self._of_before = [each for each in self._of_before if not self._is_over(each[0])]
        self._use(comm)
        self.generation += 1

    def _is_over(self, request: Any) -> bool:
        """Return whether MPI is done with a request's memory. Requests of a lost communicator end with an error."""
        with contextlib.suppress(self._mpi.Exception):
            return bool(request.Test())
        return True


def rank_in(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return the (rank, size) that this process will have in MPI, from its environment; (0, 1) if started alone."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    if is_by_srun(environment):
        return int(environment["PMIX_RANK"]), int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    return 0, 1


def is_by_srun(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process and speaks PMIx to it."""
    return "OMPI_COMM_WORLD_RANK" not in environment and "SLURM_PROCID" in environment and "PMIX_RANK" in environment


def _forget_shared_memory() -> None:
    """Unlink the shared-memory files of this host's processes.

    All processes have mapped the files already, and a killed process would leave its files behind.
    """
    for file in {word for word in _mapped() if word.startswith("/dev/shm/sm_segment.")}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


def _finalize() -> None:
    """Call MPI_Finalize in the C library: mpi4py's function holds the interpreter lock, and may not return after a
    death.
    """
    library = next((file for file in _mapped() if "/libmpi.so" in file), None)
    if library is not None:
        ctypes.CDLL(library).MPI_Finalize()


def _leave_pmix() -> None:
    """Finalise PMIx in this process, which Open MPI has initialised."""
    file = next((file for file in _mapped() if "libpmix.so" in file), None)
    if file is None:
        raise UserError("this Open MPI has PMIx built in, which srun's cannot do without", "start with mpirun")
    pmix = ctypes.CDLL(file)
    for _ in range(_AT_ONCE):
        if not pmix.PMIx_Initialized():
            return
        pmix.PMIx_Finalize(None, ctypes.c_size_t(0))


def _mapped() -> list[str]:
    """Return the files that are mapped into this process's memory."""
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]


OPEN, OPENED, DATA, CREDIT, END, RESET = range(1, 7)
HEAD = struct.Struct("<BBxxIQI")
WINDOW = 4 << 20
PIECE = 512 << 10
_BUFFER = 4 << 20

Key = tuple[int, int, bool]
"""One end of a stream.

(MPI rank of the relay that opened the stream, number of the stream at that relay, whether this end is the opening one).
"""


def other(key: Key) -> Key:
    """Return the key of the other end of the stream."""
    return key[0], key[1], not key[2]


def pack(kind: int, to: Key, number: int = 0, rest: bytes = b"") -> bytes:
    """Encode a frame for the end ``to``.

    Args:
        to: end of the stream that receives the frame.
        number: number in the header, whose meaning depends on the kind.
    """
    return HEAD.pack(kind, to[2], to[0], to[1], number) + rest


def room(length: int) -> memoryview:
    """Allocate uninitialised memory for a frame: initialising it, as ``bytearray`` does, costs as much as a copy."""
    return numpy.empty(length, numpy.uint8).data


def unpack(frame: bytes | memoryview) -> tuple[int, Key, int, memoryview]:
    """Return (kind of the frame, end of the stream that it is addressed to, number, the rest of the frame).

    Raises:
        struct.error: the bytes are no frame.
    """
    kind, dialled, rank, number, count = HEAD.unpack_from(frame)
    return kind, (rank, number, bool(dialled)), count, memoryview(frame)[HEAD.size :]


@dataclass
class RelayStream:
    """One end of a stream.

    Attributes:
        peer: MPI rank of the relay at the other end.
        sock: non-blocking socket to this node's worker; the relay closes it.
        send: function that sends a frame to the relay with a given rank.
        out: data that the worker has not accepted yet.
        credit: number of bytes that may be sent to the other end.
        owed: number of bytes passed on to the worker and not credited to the other end yet.
        is_open: whether the other end has accepted the stream.
        ends: whether the other end has sent all its data, so that no data follows ``out``.
        over: whether the stream has ended and the relay has to close the socket.
    """

    key: Key
    peer: int
    sock: socket.socket
    send: Callable[[int, bytes | memoryview], None]
    out: deque[memoryview] = field(default_factory=deque)
    credit: int = WINDOW
    owed: int = 0
    is_open: bool = False
    ends: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        self.sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    @property
    def reads(self) -> bool:
        """Return whether data of the worker can be forwarded now."""
        return self.is_open and self.credit > 0 and not self.ends

    def pull(self) -> None:
        """Forward the data that the worker has written to the other end, as far as credit allows."""
        while self.reads and not self.over:
            size = min(PIECE, self.credit)
            frame = room(HEAD.size + size)
            try:
                got = self.sock.recv_into(frame[HEAD.size :])
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if not got:
                self.send(self.peer, pack(END, other(self.key)))
                self.finish()
                return
            HEAD.pack_into(frame, 0, DATA, not self.key[2], self.key[0], self.key[1], 0)
            self.credit -= got
            self.send(self.peer, frame[: HEAD.size + got])
            if got < size // 2:
                return

    def push(self) -> None:
        """Write received data to the worker."""
        while self.out and not self.over:
            piece = self.out[0]
            try:
                taken = self.sock.send(piece)
            except BlockingIOError:
                break
            except OSError:
                self.reset("the worker has hung up")
                return
            self.owed += taken
            if taken < len(piece):
                self.out[0] = piece[taken:]
            else:
                self.out.popleft()
        if self.owed >= WINDOW // 4 or (self.owed and not self.out):
            self.send(self.peer, pack(CREDIT, other(self.key), self.owed))
            self.owed = 0
        if self.ends and not self.out:
            self.finish()

    def take(self, kind: int, number: int, rest: memoryview) -> None:
        """Process a frame for this stream.

        Args:
            number: number in the header: the bytes of a CREDIT.
            rest: bytes after the header: the data, or the reason of a RESET.
        """
        if kind == DATA:
            self.out.append(rest)
            self.push()
        elif kind == CREDIT:
            self.credit += number
            self.pull()
        elif kind == OPENED:
            self.is_open = True
            self.answer(b"+")
        elif kind == END:
            self.ends = True
            self.push()
        elif kind == RESET:
            self.fail(bytes(rest))

    def answer(self, text: bytes) -> None:
        """Send a connecting worker the result of its request: "+", or "-" and the reason."""
        with contextlib.suppress(OSError):
            self.sock.send(text)

    def reset(self, why: str) -> None:
        """Abort the stream on both ends."""
        self.send(self.peer, pack(RESET, other(self.key), rest=why.encode()))
        self.fail(why.encode())

    def fail(self, why: bytes) -> None:
        """Abort the stream on this end only."""
        if not self.is_open and not self.over:
            self.answer(b"-" + why[:200])
        self.finish()

    def finish(self) -> None:
        """Mark the stream as ended, and drop the data that the worker has not accepted."""
        self.over = True
        self.out.clear()


_HOT_S, _PAUSE_S = 0.002, 0.001
_MAX_STREAMS = 1024
_LEAVE_S = 5.0


def listen(folder: Path) -> socket.socket:
    """Return the socket that this node's workers connect to.

    The socket is created before MPI starts, so that every worker finds it.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / streams.RELAY))
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
        self._streams: dict[Key, RelayStream] = {}
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
        stream = self._streams[key] = RelayStream(key, peer, connection, self._world.send)
        if peer not in self._world.members:
            stream.fail(f"the MPI process of node {peer} is gone".encode())
        elif len(self._streams) > _MAX_STREAMS:
            stream.fail(b"too many connections")
        else:
            self._world.send(peer, pack(OPEN, other(key), rest=name.encode()))
        self._watch(stream)

    def _serve(self, stream: RelayStream, mask: int) -> None:
        if stream.over:
            return
        if mask & selectors.EVENT_WRITE:
            stream.push()
        if mask & selectors.EVENT_READ:
            stream.pull()
        self._watch(stream)

    def _watch(self, stream: RelayStream) -> None:
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
            if not streams.is_name(name):
                raise ConnectionRefusedError("no worker has such a name")
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)
            connection.connect(str(self._folder / name))
        except OSError as error:
            if connection is not None:
                connection.close()
            self._world.send(source, pack(RESET, other(key), rest=f"no worker listens there: {error}".encode()))
            return
        stream = self._streams[key] = RelayStream(key, source, connection, self._world.send, is_open=True)
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
    configure(os.environ)
    rank, _ = rank_in(os.environ)
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
