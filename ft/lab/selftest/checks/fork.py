"""Check of fork: workers are forked from a process that has imported torch and has counted the GPUs."""

import os
import select
import signal
import threading
import time

from ft.lab.selftest.ranks import devices
from ft.lab.selftest.table import Context, Failed, Measured
from ft.platform import processes
from ft.show.text import seconds

_LONGEST_S = 30.0
_FIX = (
    "something initialises CUDA or starts threads when torch is imported: look for .pth files and sitecustomize in the "
    "environment, and try ft run --preload none"
)


def fork(context: Context) -> tuple[str, Measured]:
    """Fork a process as the warm pool does; it initialises the device and computes on it."""
    began = time.monotonic()
    gpus = devices(context)
    import torch

    imported_s = time.monotonic() - began
    if torch.cuda.is_initialized():
        raise Failed("CUDA is initialised once torch is imported and the GPUs are counted", _FIX)
    if (extra := processes.threads() - 1) > 0:
        raise Failed(f"importing torch has started {extra} thread(s)", _FIX)
    took = _in_child(gpus, context.planted)
    where = f"{gpus} GPU(s), CUDA initialised in" if gpus else "no GPU: shown for the CPU only,"
    return f"{where} the forked process, {seconds(took)}", {"import_s": imported_s, "child_s": took, "gpus": gpus}


def _in_child(gpus: int, planted: bool) -> float:
    """Compute in a forked process; return the seconds until the result is there."""
    read, write = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            processes.die_with_parent(signal.SIGKILL)
            if planted:
                threading.Event().wait()
            os.write(write, b"y" if _compute(gpus) else b"n")
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], _LONGEST_S)[0]:
            raise Failed(f"the forked process did not use its device within {_LONGEST_S:.0f} s", _FIX)
        said = os.read(read, 4096).decode()
    finally:
        processes.send(pid, signal.SIGKILL)
        os.close(read)
    os.waitpid(pid, 0)
    if said != "y":
        raise Failed(f"the forked process failed: {said or 'it ended without a word'}", _FIX)
    return time.monotonic() - began


def _compute(gpus: int) -> bool:
    import torch

    devices = [torch.device("cuda", number) for number in range(gpus)] or [torch.device("cpu")]
    torch.set_num_threads(1)
    for device in devices:
        x = torch.ones(256, 256, device=device)
        if (x @ x).sum().item() != 256**3:
            return False
    return True
