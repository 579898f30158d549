"""A communicator over the nodes' MPI processes that survives the loss of members (ULFM: revoke, shrink).

There is one MPI process per node, the relay, which carries data between the workers of different nodes
(:mod:`ft.net.mpi` describes the system). Frames (messages) between two members arrive in order. When MPI reports a
failed process to some member, that member revokes the communicator, so that all members are notified. Then all members
shrink the communicator, which starts another ``generation``. Frames on their way at that time are lost, also between
survivors, and the relays have to restart their streams.

This has the following requirements with Open MPI 5.0.11 (shown by mpi_facts.py and mpi_hosts.py in tools/experiments):

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
import os
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.net.mpi_streams import room

BEAT_S, SILENT_S = 1.0, 10.0
_TAG = 7
_AT_ONCE = 16
_SHARED = 512
_FT_FILE = "share/openmpi/amca-param-sets/ft-mpi"


def configure(environment: dict[str, str]) -> None:
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

    def __init__(self):
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

    def _failed(self, error: Exception) -> None:
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
            return request.Test()
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
