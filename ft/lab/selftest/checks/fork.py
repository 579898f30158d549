"""Check of fork: workers are forked from a process that has imported torch and has counted the GPUs."""

import threading
import time

import torch

from ft.lab.selftest.ranks import CheckRank, Crew, devices
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
    gpus = devices(context)
    if torch.cuda.is_initialized():
        raise Failed("CUDA is initialised once torch is imported and the GPUs are counted", _FIX)
    if (extra := processes.threads() - 1) > 0:
        raise Failed(f"importing torch has started {extra} thread(s)", _FIX)
    began = time.monotonic()
    try:
        is_right = Crew(context, 1, _compute).wait(_LONGEST_S)[0]
    except Failed as failure:
        raise Failed(f"the forked process did not use its device: {failure.problem}", _FIX) from failure
    took = time.monotonic() - began
    if not is_right:
        raise Failed("the forked process computes wrongly on its device", _FIX)
    where = f"{gpus} GPU(s), CUDA initialised in" if gpus else "no GPU: shown for the CPU only,"
    return f"{where} the forked process, {seconds(took)}", {"child_s": took, "gpus": gpus}


def _compute(rank: CheckRank) -> bool:
    if rank.planted:
        threading.Event().wait()
    for device in [torch.device("cuda", number) for number in range(rank.gpus)] or [torch.device("cpu")]:
        x = torch.ones(256, 256, device=device)
        if (x @ x).sum().item() != 256**3:
            return False
    return True
