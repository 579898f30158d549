"""Fault injection inside a worker process: one function for each kind of fault that a worker inflicts on itself.

``ft.faults.worker.Injector`` looks a function up in ``ACTS`` by the kind of a planned fault and calls it with that
:class:`Fault`. The kinds in ``IN_TRAINING`` raise an exception in the calling thread, or block or corrupt the training
step there, so the injector carries them out on the training thread only.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ft.base.errors import RecoverableError, ReplaceNodeError, UserError
from ft.faults import exhaust
from ft.faults.faults import Fault

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


def kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def segfault(fault: Fault) -> None:
    ctypes.string_at(0)


def leave(fault: Fault) -> None:
    os._exit(1)


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


def kill_agent(fault: Fault) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def kill_the_control_plane(fault: Fault) -> None:
    from ft.faults.agent import kill_control

    kill_control(Path(os.environ["FT_RUN_DIR"]))


ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": kill,
    "terminate": terminate,
    "segfault": segfault,
    "exit": leave,
    "hang": hang,
    "gil": hold_the_interpreter,
    "stall": stall,
    "exception": raise_error,
    "lose-device": lose_device,
    "cuda-fault": break_cuda,
    "out-of-memory": exhaust.memory,
    "out-of-files": exhaust.files,
    "disk-full": exhaust.disk,
    "io-error": exhaust.read,
    "kill-agent": kill_agent,
    "kill-control": kill_the_control_plane,
}

IN_TRAINING = {"stall", "exception", "lose-device", "cuda-fault", "out-of-memory", "out-of-files", "io-error"}
IN_TRAINING |= {"corrupt-tensor", "stale-state", "out-of-step"}


def _wake_later(seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-I", "-S", "-c", _CONTINUE, str(os.getpid()), str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
