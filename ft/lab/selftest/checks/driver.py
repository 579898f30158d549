"""Checks of what the driver leaves to a process: whether its threads run while launches wait, and when memory is free.

The parts that time these are shared with ``tools/experiments/gpu_probes.py``.
"""

import ctypes
import importlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from ft.base import bounded_json
from ft.job.agent.devices import FREE_S, is_free
from ft.lab.selftest.ranks import devices
from ft.lab.selftest.table import Context, Failed, Measured, Skipped
from ft.platform.devices import GpuState, read
from ft.show.text import seconds
from megatron import patches

_TICK_S, _POLL_S = 0.01, 0.02
_LONGEST_S, _PLANTED_S = 1.0, 2.0
"""Seconds for which no thread may have to wait for the interpreter lock; seconds for which the planted fault keeps it.
"""
_BUSY_CYCLES, _WIDTH = 6_000_000_000, 1024
"""Clock cycles for which the device is kept busy, about three seconds; width of the layer, in elements."""
_LOCKED = (
    "behind a hung collective, heartbeats and aborts stop with the other threads, and the worker is replaced only "
    "after the limit silent_s: use Transformer Engine 2.4 or newer"
)
_MOST_MIB, _PINNED_MIB = 8 << 10, 1 << 10
"""Largest memory of the device that a process holds, and its page-locked memory, in MiB."""
_UNSEEN = "node agents cannot see when a device is free here: look whether nvidia-smi shows the memory in use"
_IN_USE = (
    "ft run gives such a device to no further worker: look in nvidia-smi for processes that keep its memory (MPS, a "
    "process stuck in the driver), and in dmesg"
)


class Ticker(threading.Thread):
    """A thread that wakes up every 10 ms; ``longest_s`` is the longest time, in seconds, for which it did not."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s, self._over, self._began = 0.0, threading.Event(), time.monotonic()
        self.start()

    def run(self) -> None:
        """Tick until :meth:`stop`."""
        last, is_over = self._began, False
        while not is_over:
            is_over = self._over.wait(_TICK_S)
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, round(now - last, 3)), now

    def stop(self) -> float:
        """End the thread, and return the longest time without a tick in seconds."""
        self._over.set()
        self.join()
        return self.longest_s


def launches(context: Context) -> tuple[str, Measured]:
    """Fill the launch queue by forward and backward passes of a layer of Transformer Engine; a thread has to tick."""
    here = patches.platform()
    if context.planted:
        step = _keeps_the_lock
    elif here.name != "cuda":
        raise Skipped("no GPU: no queue of launches")
    else:
        here.select_device(0)
        step = _passes(here.device)
    ticker, began = Ticker(), time.monotonic()
    passes = step()
    measured: Measured = {"without_a_tick_s": ticker.stop(), "passes": passes, "launching_s": time.monotonic() - began}
    said = f"{passes} passes of forward and backward launched in {seconds(measured['launching_s'])}"
    if measured["without_a_tick_s"] > _LONGEST_S:
        raise Failed(f"{said}; no other thread ran for {seconds(measured['without_a_tick_s'])}", _LOCKED, measured)
    return f"{said}; a thread waited {seconds(measured['without_a_tick_s'])} at most", measured


def _keeps_the_lock() -> int:
    ctypes.PyDLL(None).usleep(int(_PLANTED_S * 1e6))
    return 1


def _passes(device: torch.device) -> Callable[[], int]:
    """Return a function that launches passes of a layer until the device, which is busy before them, comes to them;
    the function returns their number.

    Raises:
        Skipped: Transformer Engine is not installed.
    """
    try:
        te = importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise Skipped(f"Transformer Engine cannot be imported: {error}") from error
    layer = te.Linear(_WIDTH, _WIDTH, params_dtype=torch.bfloat16, device=device)
    data = torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    layer(data).sum().backward()  # libraries are loaded and memory is allocated here
    torch.cuda.synchronize()

    def launch() -> int:
        torch.cuda._sleep(_BUSY_CYCLES)
        reached, passes = torch.cuda.Event(), 0
        reached.record()
        while not reached.query():
            layer(data).sum().backward()
            passes += 1
        torch.cuda.synchronize()
        return passes

    return launch


_HOLDER = """
import json, sys, time
import torch

device, mib, pinned_mib = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
wait = torch.cuda.synchronize if device != "cpu" else lambda: None
began = time.monotonic()
held = [torch.ones(1, device=device)]
wait()
found = {"context_s": time.monotonic() - began}
if mib:
    matrix = torch.ones(512, 512, device=device)
    began = time.monotonic()
    matrix @ matrix
    wait()
    found["first_product_s"] = time.monotonic() - began
    held.append(torch.ones(mib << 20, dtype=torch.uint8, device=device))
if pinned_mib:
    held.append(torch.ones(pinned_mib << 20, dtype=torch.uint8).pin_memory())
wait()
print(json.dumps(found), flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that holds memory until it is killed.

    Args:
        device: its device, "cpu" or one of CUDA.
        mib: MiB on the device; 0: a context only.
        pinned_mib: page-locked MiB of the host.

    Attributes:
        found: seconds of its context and, if it has more than that, of its first matrix product.
    """

    def __init__(self, device: torch.device | str, mib: int = 0, pinned_mib: int = 0):
        words = [sys.executable, "-c", _HOLDER, str(device), str(mib), str(pinned_mib)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.found: dict[str, Any] = bounded_json.loads(self._process.stdout.readline() or b"{}")

    def host_bytes(self) -> int:
        """Return how many bytes of the host's memory the process occupies, 0 after its end."""
        if self._process.poll() is not None:
            return 0
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def end(self, has_freed: Callable[[], bool], limit_s: float, spared: bool = False) -> Measured:
        """Send SIGKILL to the process, and wait until its memory is free.

        Args:
            has_freed: says whether the memory is free.
            limit_s: longest time to wait for it, in seconds.
            spared: whether to send the signal only after that wait, as if it had not ended the process.

        Returns:
            ``ended_s`` and ``free_s``: seconds until the process has ended, and until its memory was free; ``free_s``
            is missing if it was not.
        """
        began, found = time.monotonic(), {}
        if not spared:
            self._process.kill()
            self._process.wait()
            found["ended_s"] = time.monotonic() - began
        while not (is_over := has_freed()) and time.monotonic() - began < limit_s:
            time.sleep(_POLL_S)
        if is_over:
            found["free_s"] = time.monotonic() - began
        self._process.kill()
        self._process.wait()
        return found


def freed(context: Context) -> tuple[str, Measured]:
    """Kill a process that holds memory of a device, and measure how long a new worker has to wait for that memory.

    The source and the limits are those of a node agent. Without a GPU, it is memory of the host.
    """
    on_gpu, before = devices(context) > 0, read()
    if on_gpu and not before:
        raise Skipped("the driver does not say how much memory of a device is in use")
    mib, pinned = (min(_MOST_MIB, (before[0].total - before[0].used) // 4 >> 20), _PINNED_MIB) if on_gpu else (128, 0)
    holder = Holder("cuda:0" if on_gpu else "cpu", mib, pinned)
    if not holder.found:
        raise Failed("a process cannot allocate memory of the device", "see its message in the log of this check")

    def has_freed() -> bool:
        return _is_free(read(), before) if on_gpu else holder.host_bytes() == 0

    if has_freed():
        raise Failed(f"{mib} MiB that a process has allocated are not seen", _UNSEEN)
    limit_s = _PLANTED_S if context.planted else FREE_S
    measured: Measured = {"bytes": mib << 20, **holder.found, **holder.end(has_freed, limit_s, context.planted)}
    size = f"{(mib << 20) / 1e9:.1f} GB of {'the device' if on_gpu else 'the host (no GPU)'}"
    if "free_s" not in measured:
        raise Failed(f"{size} are still in use {seconds(limit_s)} after SIGKILL", _IN_USE, measured)
    ready = f"; a context takes {seconds(measured['context_s'])}" if on_gpu else ""
    return f"{size} free {seconds(measured['free_s'])} after SIGKILL{ready}", measured


def _is_free(now: list[GpuState], before: list[GpuState]) -> bool:
    return bool(now) and is_free(now[0], before[0])
