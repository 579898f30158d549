"""The nodes' MPI processes as a world that loses members and goes on (ULFM: revoke, shrink).

Frames go from member to member in order. When MPI reports a failed process, on whichever member first, that member
revokes the communicator, so that all notice; all shrink it, and the world has another ``generation``. Frames under way
between two generations are lost, those between survivors too: who used them begins again.

What that takes with Open MPI 5.0.11 (shown by mpi_facts.py and mpi_hosts.py in tools/experiments):

* Only the blocking shrink works: on a revoked communicator the test of ``MPIX_Comm_ishrink`` ends in MPI_ERR_INTERN. It
  waits for a member that hangs. For this there is Open MPI's heartbeat detector, which declares who was silent for
  ``SILENT_S`` dead for good: such a process aborts as soon as it hears of it. The detector has no thread of its own, so
  that a heartbeat says that the loop of that process turns.
* Deaths are spread by Open MPI's own broadcast. By mpirun's daemons, which is the default, they do not reach all when a
  daemon died with its node, and the shrink waits for ever.
* All connections are made at the start: later ones ask those daemons for addresses.
* Slurm's mpi/pmix plugin ends the whole step when Open MPI tells it of a death. So once all are connected, a process
  started by srun takes its leave of PMIx, and nobody is told.
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
    """Sets what Open MPI reads when it starts; what the user has set stays.

    Raises:
        UserError: mpirun itself would end the whole job with the first process that dies.
    """
    by_mpirun = "OMPI_COMM_WORLD_RANK" in environment
    if by_mpirun and environment.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("1", "true"):
        raise UserError("mpirun was started without fault tolerance", "start with: mpirun --with-ft ulfm ...")
    settings = {"mpi_ft_enable": "1", "mpi_ft_detector": "1", "mpi_ft_detector_thread": "0"}
    settings |= {"mpi_ft_detector_period": f"{BEAT_S:g}", "mpi_ft_detector_timeout": f"{SILENT_S:g}"}
    settings |= {"mpi_ft_propagator_with_rbcast": "1", "mpi_yield_when_idle": "1"}
    for name, value in settings.items():
        environment.setdefault(f"OMPI_MCA_{name}", value)
    if (Path(sys.prefix) / _FT_FILE).exists():  # the wheel, which without mpirun looks for this file where it was built
        environment.setdefault("OPAL_PREFIX", sys.prefix)


@dataclass
class _Coming:
    """A frame that MPI is receiving."""

    request: Any
    frame: memoryview


class World:
    """This process's membership; one thread uses it.

    Attributes:
        rank, size: as started; they name members for good. members: ranks that live, as far as is known.
        generation: how often the communicator was shrunk.
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
        """What each member has given, by rank: ``_SHARED`` bytes at most; all call it together, first of all."""
        everything = bytearray(_SHARED * self.size)
        self._comm.Allgather([mine.ljust(_SHARED, b"\0"), self._mpi.BYTE], [everything, self._mpi.BYTE])
        return [bytes(everything[i * _SHARED : (i + 1) * _SHARED]).rstrip(b"\0") for i in range(self.size)]

    def send(self, to: int, frame: bytes | memoryview) -> None:
        """Starts to send ``frame``, which must not change any more; one for who is no member is dropped."""
        place = self._place_of.get(to)
        if place is None:
            return
        try:
            self._going.append((self._comm.Isend([frame, self._mpi.BYTE], place, _TAG), frame))
        except self._mpi.Exception as error:
            self._failed(error)

    def receive(self) -> list[tuple[int, memoryview]]:
        """(sender, frame) of what has come, each sender's in its order; also does what is to be done after a death."""
        try:
            self._accept()
            self._flush()
            return self._take()
        except self._mpi.Exception as error:
            self._failed(error)
            return []

    def leave(self, patience_s: float) -> bool:
        """Ends MPI together with the others; whether that came about, which takes mpirun, within ``patience_s``."""
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
        """Has what was announced received; a part of it at a time, so that sending gets its turn."""
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
        """Large frames end later than small ones that were sent after them; here they get into their order again."""
        found = []
        for place, queue in self._coming.items():
            while queue and queue[0].request.Test():
                found.append((self.members[place], queue.popleft().frame))
        return found

    def _failed(self, error: Exception) -> None:
        """A member has died, or another one has noticed that."""
        mpi = self._mpi
        comm = None
        while comm is None:
            if error.Get_error_class() not in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED):
                raise error
            self._comm.Revoke()
            try:
                comm = self._comm.Shrink()
            except mpi.Exception as another:  # one more has died meanwhile
                error = another
        self._of_before += self._going
        self._of_before += [(each.request, each.frame) for queue in self._coming.values() for each in queue]
        self._going.clear()
        self._coming.clear()
        self._of_before = [each for each in self._of_before if not self._is_over(each[0])]
        self._use(comm)
        self.generation += 1

    def _is_over(self, request: Any) -> bool:
        """Whether MPI is done with its memory: one of a communicator that is no more ends too, with an error."""
        with contextlib.suppress(self._mpi.Exception):
            return request.Test()
        return True


def rank_in(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, size) that this process will have in MPI, by what has started it; alone: (0, 1)."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        return int(environment["OMPI_COMM_WORLD_RANK"]), int(environment["OMPI_COMM_WORLD_SIZE"])
    if is_by_srun(environment):
        return int(environment["PMIX_RANK"]), int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    return 0, 1


def is_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process and speaks PMIx to it."""
    return "OMPI_COMM_WORLD_RANK" not in environment and "SLURM_PROCID" in environment and "PMIX_RANK" in environment


def _forget_shared_memory() -> None:
    """Takes the name off what processes of one host share: all have it now, and who is killed tidies up nothing."""
    for file in {word for word in _mapped() if word.startswith("/dev/shm/sm_segment.")}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


def _finalize() -> None:
    """MPI's own: mpi4py's would hold the interpreter meanwhile, and with a member dead it may not come back."""
    library = next((file for file in _mapped() if "/libmpi.so" in file), None)
    if library is not None:
        ctypes.CDLL(library).MPI_Finalize()


def _leave_pmix() -> None:
    """Ends this process's use of PMIx, which Open MPI has begun."""
    file = next((file for file in _mapped() if "libpmix.so" in file), None)
    if file is None:
        raise UserError("this Open MPI has PMIx built in, which srun's cannot do without", "start with mpirun")
    pmix = ctypes.CDLL(file)
    for _ in range(_AT_ONCE):
        if not pmix.PMIx_Initialized():
            return
        pmix.PMIx_Finalize(None, ctypes.c_size_t(0))


def _mapped() -> list[str]:
    """The files in this process's memory."""
    return [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
