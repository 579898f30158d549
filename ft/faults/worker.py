"""Faults that a worker injects: the worker announces each fault, then inflicts it on itself.

``ACTS`` has a function for each kind of fault that needs nothing but the process. The kinds in ``IN_TRAINING`` raise an
exception in the calling thread, or block or corrupt the training step there, so the injector carries them out on the
training thread only. Resources are exhausted by lowering the process's own limits, so that the kernel refuses further
allocations. Faults of messages are filters that replace a message to be sent: a frame is a chunk of a snapshot on its
way to a peer (``ft.state.transfer.Sender.disturb``), a report is a message of a worker to its agent
(``ft.job.agent.link.Link.disturb``).
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ft.base import events
from ft.base.errors import RecoverableError, ReplaceNodeError, UserError
from ft.faults.faults import RECOVERY_PHASES, STEP_PHASES, Fault, FaultTimer, planned

_ROOM = 64 << 20
"""Bytes that a worker can still allocate after a planned lack of memory has lowered its RLIMIT_AS."""
_PIECE = 1 << 20
"""Bytes of one allocation."""
_FILES_LEFT = 16
"""Files that a worker can still open after a planned lack of descriptors has lowered its RLIMIT_NOFILE."""


def use_up_memory(fault: Fault) -> None:
    """Use up the address space. The traceback of the MemoryError, which always comes, keeps the memory as long as the
    error lasts.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _ROOM)
    taken = []
    while True:
        taken.append(bytearray(_PIECE))


def use_up_files(fault: Fault) -> None:
    """Use up the file descriptors, for the rest of the life of the process; always raises OSError with EMFILE."""
    used = max(map(int, os.listdir("/proc/self/fd")))
    _lower(resource.RLIMIT_NOFILE, used + _FILES_LEFT)
    while True:
        os.open(os.devnull, os.O_RDONLY)


def fill_disk(fault: Fault) -> None:
    """Make writes of this process fail for ``fault.seconds`` seconds, as on a full disk.

    A limit on the size of files does it, so that the error is EFBIG and not ENOSPC.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    timer = threading.Timer(fault.seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, before))
    timer.daemon = True
    timer.start()


def fail_read(fault: Fault) -> None:
    """Read from an address that the kernel cannot read; always raises OSError with EIO."""
    with open("/proc/self/mem", "rb", buffering=0) as file:
        file.read(1)  # address 0, which is never mapped


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


_ERRORS = {
    "recoverable": RecoverableError,
    "timeout": TimeoutError,
    "software": RuntimeError,
    "node": ReplaceNodeError,
    "user": lambda text: UserError(text, "remove the injected fault"),
}
_FOR_EVER_S = 3600.0
# Program of a helper process: it sends SIGCONT to a stopped process (argv[1]) after argv[2] seconds. If the stopped
# process dies earlier, the helper reads end of file on its standard input and exits without output.
_CONTINUE = """
import os, select, signal, sys
ended = select.select([0], [], [], float(sys.argv[2]))[0]
if not ended:
    os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def hang(fault: Fault) -> None:
    waker = _wake_later(fault.seconds) if fault.seconds is not None else None
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.stdin.close()
        waker.wait()


def hold_the_interpreter(fault: Fault) -> None:
    """Hold the interpreter lock (GIL) while sleeping, so that no other thread of this process can run Python code.

    A function that is called through ``ctypes.PyDLL`` does not release the lock.
    """
    usleep = ctypes.PyDLL(None).usleep
    left = _FOR_EVER_S if fault.seconds is None else fault.seconds
    ended = time.monotonic() + left
    while (left := ended - time.monotonic()) > 0:
        usleep(ctypes.c_uint(int(min(left, 1000.0) * 1e6)))


# The names of segfault and stall appear in the stacks that ft diagnose shows.
def segfault(fault: Fault) -> None:
    ctypes.string_at(0)


def stall(fault: Fault) -> None:
    time.sleep(_FOR_EVER_S if fault.seconds is None else fault.seconds)


def raise_error(fault: Fault) -> None:
    raise _ERRORS[fault.error](f"injected fault {fault.number}: {fault}")


def lose_device(fault: Fault) -> None:
    raise RuntimeError(f"CUDA error: no CUDA-capable device is detected (injected fault {fault.number}: {fault})")


def break_cuda(fault: Fault) -> None:
    """Make a CUDA kernel fail on an index that is out of range; every later call in this CUDA context then fails."""
    import torch

    values = torch.zeros(1, device="cuda")
    print(values[torch.tensor([1 << 20], device="cuda")].item())


def kill_the_control_plane(fault: Fault) -> None:
    from ft.faults.agent import kill_control

    kill_control(Path(os.environ["FT_RUN_DIR"]))


ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda fault: os.kill(os.getpid(), signal.SIGTERM),
    "segfault": segfault,
    "exit": lambda fault: os._exit(1),
    "hang": hang,
    "gil": hold_the_interpreter,
    "stall": stall,
    "exception": raise_error,
    "lose-device": lose_device,
    "cuda-fault": break_cuda,
    "out-of-memory": use_up_memory,
    "out-of-files": use_up_files,
    "disk-full": fill_disk,
    "io-error": fail_read,
    "kill-agent": lambda fault: os.kill(os.getppid(), signal.SIGKILL),
    "kill-control": kill_the_control_plane,
}

IN_TRAINING = {"stall", "exception", "lose-device", "cuda-fault", "out-of-memory", "out-of-files", "io-error"}
IN_TRAINING |= {"corrupt-tensor", "stale-state", "out-of-step"}


def _wake_later(seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-I", "-S", "-c", _CONTINUE, str(os.getpid()), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


def damage_checkpoint(checkpoint: Path, kind: str) -> Path:
    """Damage the largest file of a checkpoint, as the kind of the fault says; return its path."""
    files = [path for path in checkpoint.iterdir() if path.suffix == ".distcp"]
    file = max(files, key=lambda path: (path.stat().st_size, path.name))
    if kind == "remove-checkpoint":
        file.unlink()
    elif kind == "truncate-checkpoint":
        os.truncate(file, file.stat().st_size // 2)
    else:
        with open(file, "r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            byte = stream.read(1)[0]
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte ^ 1]))
    return file


_REPORT_DELAY_S = 0.3
"""Delay of a report, in seconds."""


class ChunkFilter:
    """Filter for the chunks of one snapshot transfer."""

    def __init__(self, kind: str, seconds: float | None):
        self._how, self._seconds = kind.partition("-")[0], seconds or 0.0
        self._kept: list[list] = []

    def __call__(self, index: int, total: int, pieces: list) -> list[list]:
        """Return what to send instead of chunk ``index`` of ``total``. ``pieces`` are its head and its bytes."""
        if self._how == "reorder" and total > 1:
            return self._swap(index, pieces)
        if index > 0:
            return [pieces]
        if self._how == "delay":
            time.sleep(self._seconds)
        return {"lose": [], "duplicate": [pieces, pieces], "corrupt": [_damaged(pieces)]}.get(self._how, [pieces])

    def _swap(self, index: int, pieces: list) -> list[list]:
        if index == 0:
            self._kept = [pieces]
            return []
        sent, self._kept = [pieces, *self._kept], []
        return sent


def _damaged(pieces: list) -> list:
    head, chunk = pieces
    chunk = bytearray(chunk)
    chunk[len(chunk) // 2] ^= 1
    return [head, chunk]


class Reports:
    """Filter for the reports of a worker during a number of seconds; thread-safe.

    The report that a fault is injected passes unchanged: it is the record that keeps the fault from happening again.
    """

    def __init__(self, kind: str, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._how, self._clock = kind.partition("-")[0], clock
        self._until = clock() + seconds
        self._lock = threading.Lock()
        self._kept: list[Any] = []

    def __call__(self, report: Any) -> list[Any]:
        """Return what to send instead of ``report``."""
        if getattr(report, "event", None) == events.FAULT_INJECTED:
            return [report]
        if self._clock() < self._until:
            if self._how == "lose":
                return []
            if self._how == "duplicate":
                return [report, report]
            if self._how == "delay":
                time.sleep(_REPORT_DELAY_S)
                return [report]
        with self._lock:
            kept, self._kept = self._kept, []
            if self._how == "reorder" and not kept and self._clock() < self._until:
                self._kept = [report]
                return []
        return [report, *kept]


MOST_SLEEP_S = 10.0
"""Maximum extra duration of a slow step, in seconds."""

_UNMEASURED_STEP_S = 0.1
"""Assumed duration in seconds of a step that was not measured."""


class Actions(Protocol):
    """Faults that need the internals of the worker's session."""

    def act(self, fault: Fault) -> None:
        """Carry out ``fault``, of a kind that is not in ``ACTS``."""


class Injector(FaultTimer):
    """Carries out the planned faults of one logical rank, in the worker that holds it.

    Args:
        actions: carries out the faults that need the worker's session.
        began: wall-clock time in seconds at which training began; default: now.
        fired: numbers of the faults that have happened; a repeated step has no fault the second time.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        node: str,
        fired: Iterable[int],
        announce: Callable[[Fault], None],
        actions: Actions,
        began: float | None = None,
    ):
        mine = [f for f in faults if f.rank == rank or (f.node is not None and f.node == node)]
        super().__init__([f for f in mine if not f.is_injected_by_agent], announce, fired)
        self._actions = actions
        self._pending: list[Fault] = []
        self._steps = {fault.number: fault.step for fault in faults}
        self._slowdown = _Slowdown()
        self._planned: dict[tuple[str, int], list[Fault]] = {}
        for fault in self._mine:
            if fault.step is not None:
                self._planned.setdefault((fault.phase, fault.step), []).append(fault)
        # Lets ``at`` return at once if no fault is planned for this worker.
        self.is_armed = bool(self._mine)
        self.begin(began)

    @classmethod
    def from_environment(
        cls,
        rank: int,
        node: str,
        fired: Iterable[int],
        announce: Callable[[Fault], None],
        actions: Actions,
        environment: Mapping[str, str] = os.environ,
    ) -> "Injector":
        """Return an injector for the faults in the file that ``FT_FAULTS`` names.

        The variable ``FT_BEGAN`` holds the wall-clock time at which training began; default: now.
        """
        began = environment.get("FT_BEGAN")
        return cls(planned(environment), rank, node, fired, announce, actions, None if began is None else float(began))

    def has(self, phase: str) -> bool:
        """Return whether a fault in ``phase`` of some step is still to come on this worker."""
        with self._lock:
            return any(f.phase == phase and f.step is not None and f.number not in self._fired for f in self._mine)

    def at(self, phase: str, step: int) -> None:
        """Carry out the faults that are due at ``phase`` of ``step`` (counted from 1).

        Raises:
            Exception: the exception that a planned fault raises.
        """
        if not self.is_armed:
            return
        if phase == "between":
            self._slowdown.step_begins()
        # "transfer" is excluded because a worker also passes it at the end of a recovery, outside of any step.
        while self._pending and phase in STEP_PHASES and phase != "transfer":
            self._do(self._pending.pop(0))
        for fault in self._due(phase, step):
            self._fire(fault)

    def _due(self, phase: str, step: int) -> Sequence[Fault]:
        """Return the faults that are due at this point.

        In a recovery, ``step`` may be too small: a worker that has just taken over a logical rank does not know the
        step of the run. The run has at least reached the step of the latest fault that has happened.
        """
        if phase not in RECOVERY_PHASES:
            return self._planned.get((phase, step), ())
        with self._lock:
            latest = max([step, *(self._steps[number] or 0 for number in self._fired if number in self._steps)])
            return [f for f in self._mine if f.phase == phase and f.number not in self._fired and f.step <= latest]

    def _fire(self, fault: Fault) -> None:
        if not self._is_first(fault):
            return
        self._announce(fault)
        if fault.step is None and fault.kind in IN_TRAINING:
            self._pending.append(fault)  # on the timer's thread; the training thread carries it out
        else:
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        if fault.kind == "slow":
            self._slowdown.start(fault.factor, fault.seconds)
        elif fault.kind in ACTS:
            ACTS[fault.kind](fault)
        else:
            self._actions.act(fault)


class _Slowdown:
    """Makes steps last ``factor`` times as long for a while, by sleeping at the start of each step."""

    def __init__(self):
        self._factor, self._until = 1.0, 0.0
        self._began: float | None = None

    def start(self, factor: float, seconds: float) -> None:
        self._factor, self._until = factor, time.monotonic() + seconds

    def step_begins(self) -> None:
        """Sleep for ``factor - 1`` times the duration of the last step, if a slowdown is active."""
        now = time.monotonic()
        if now < self._until:
            last = now - self._began if self._began is not None else _UNMEASURED_STEP_S
            time.sleep(min(last * (self._factor - 1.0), MOST_SLEEP_S, self._until - now))
        self._began = time.monotonic()
