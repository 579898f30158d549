"""The ranks of a check: processes forked from the check's own, which meet in a store that the check hosts.

A rank's function has imported torch already, but must be the first to initialise a device. If there are fewer GPUs than
ranks, NCCL refuses two ranks on one GPU because they have the same host and the same bus id (``init.cc``: "Duplicate
GPU detected"). The ranks then pretend to be on different hosts (``NCCL_HOSTID``), and communicate over sockets.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ft.base import bounded_json, files
from ft.base.checkout import CHECKOUT
from ft.base.errors import EpochClosed, FtError
from ft.lab.selftest.session import last_line
from ft.lab.selftest.table import Context, Failed
from ft.net.store import StoreConnection, StoreServer
from ft.platform import processes
from ft.state.groups import Groups, Rendezvous
from megatron import patches

_POLL_S, _STORE_S, _CLOSED_S, _LATE_S, _DUMP_S = 0.01, 60.0, 20.0, 2.0, 0.5
_ELEMENTS = 1 << 16
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
SHARED_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}
"""Settings that keep NCCL to sockets, for ranks that share a GPU, and with which NCCL 2.30 lets them share it."""


def devices(context: Context) -> int:
    """Return the number of GPUs that a check may use, without initialising CUDA in this process."""
    os.environ.setdefault(_NVML_CHECK, "1")
    if patches.platform().name != "cuda":
        return 0
    return min(torch.cuda.device_count(), context.gpus or torch.cuda.device_count())


def shared_gpu(number: int) -> dict[str, str]:
    """Return the environment variables of process ``number`` of several that share a GPU under NCCL."""
    return {**SHARED_GPU, "NCCL_HOSTID": f"ft-selftest-{number}"}


@dataclass(frozen=True)
class CheckRank:
    """What a rank's function is given. ``planted``: whether the check's fault is to be made; ``gpus``: number of GPUs
    that the ranks use; 0: none."""

    number: int
    size: int
    address: str
    planted: bool
    store: dist.Store
    gpus: int

    def device(self) -> torch.device:
        """Select this rank's device and return it."""
        here = patches.platform()
        here.select_device(self.number % self.gpus if self.gpus else 0)
        return here.device

    def meet(self, what: str) -> None:
        """Wait for all ranks, without a process group."""
        self.store.set(f"meet/{what}/{self.number}", "")
        self.store.wait([f"meet/{what}/{rank}" for rank in range(self.size)], timedelta(seconds=_STORE_S))


_IF_WRONG = "if a result is wrong, do not train on this node: look at nvidia-smi -q (ECC) and dmesg"
TOKEN = "selftest of one check"
"""Token of a check's store, which only its own processes use."""


class Crew:
    """The ranks of a check. ``function`` is what each rank does, and returns JSON values; ``name`` distinguishes
    several crews."""

    def __init__(self, context: Context, size: int, function: Callable[[CheckRank], Any], name: str = "ranks"):
        self.size, self._folder = size, context.scratch / name
        self._folder.mkdir(parents=True)
        gpus = devices(context)
        self._pids = [self._fork(number, function, context.planted, gpus) for number in range(size)]
        self._codes: dict[int, int] = {}
        # The store starts threads, so it is made after the forks.
        self._server = StoreServer("127.0.0.1", 0, TOKEN)
        self.store = StoreConnection(self._server.address, TOKEN, _STORE_S)
        files.replace(self._folder / "address", self._server.address)

    def kill(self, number: int) -> None:
        """Send SIGKILL to a rank."""
        os.kill(self._pids[number], signal.SIGKILL)

    def wait(self, limit_s: float, expected: set[int] | None = None) -> dict[int, Any]:
        """Wait for the ``expected`` ranks (None: all), kill the others, and return rank -> result.

        Raises:
            Failed: one of them has failed, or has not come back in time.
        """
        expected = set(range(self.size)) if expected is None else expected
        deadline = time.monotonic() + limit_s
        while not self._have_ended(expected) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        missing = sorted(expected - self._codes.keys())
        self._end(missing)
        self._server.close()
        problems = [self._problem(number) for number in sorted(expected - set(missing)) if self._codes[number]]
        if problems:
            raise Failed(problems[0], f"see the logs in {self._folder}; {_IF_WRONG}")
        if missing:
            numbers = ", ".join(map(str, missing))
            raise Failed(
                f"rank {numbers} of {self.size} did not come back within {limit_s:.0f} s: {self._where(missing[0])}",
                f"an operation or an abort does not return here: see {self._folder}, and try another release of NCCL "
                "and of the driver",
            )
        return {
            number: bounded_json.loads((self._folder / f"{number}.json").read_text(), non_finite=True)
            for number in expected
        }

    def _end(self, missing: list[int]) -> None:
        """Kill the remaining ranks, after those that are missing have written where each of their threads is."""
        for number in missing:
            processes.send(self._pids[number], signal.SIGUSR1)
        time.sleep(_DUMP_S if missing else 0)
        for number in set(range(self.size)) - self._codes.keys():
            processes.send(self._pids[number], signal.SIGKILL)

    def _have_ended(self, expected: set[int]) -> bool:
        for number, pid in enumerate(self._pids):
            if number not in self._codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._codes[number] = os.waitstatus_to_exitcode(status)
        failed = any(self._codes.get(number) for number in expected)
        return failed or expected <= self._codes.keys()

    def _problem(self, number: int) -> str:
        how = processes.how_it_ended(self._codes[number])
        return f"rank {number} {how}: {last_line(self._folder / f'{number}.log')}"

    def _where(self, number: int) -> str:
        """Return the innermost line of this project in the dump of a rank's main thread, which comes last."""
        log = self._folder / f"{number}.log"
        dump = log.read_text(errors="replace").rpartition("Thread ")[2].rpartition("thread ")[2] if log.exists() else ""
        own = (line.strip() for line in dump.splitlines() if f'"{CHECKOUT}/ft/' in line)
        return next(own, "where is not known").replace(f"{CHECKOUT}/", "")

    def _fork(self, number: int, function: Callable[[CheckRank], Any], planted: bool, gpus: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            processes.die_with_parent(signal.SIGKILL)
            log = os.open(self._folder / f"{number}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if gpus and gpus < self.size:
                os.environ.update(shared_gpu(number))
            faulthandler.register(signal.SIGUSR1)
            torch.set_num_threads(1)
            address = _read(self._folder / "address")
            store = StoreConnection(address, TOKEN, _STORE_S)
            result = function(CheckRank(number, self.size, address, planted, store, gpus))
            files.replace(self._folder / f"{number}.json", json.dumps(result))
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class TestRank:
    """A rank with reconfigurable process groups, which closes epochs when a key of the store says so. In a run, the
    control plane closes epochs; here the check's process or another rank does."""

    def __init__(self, rank: CheckRank, timeout_s: float):
        self._rank, self.epoch, self.device = rank, 0, rank.device()
        self._rendezvous = Rendezvous(rank.address, TOKEN)
        self._closed = threading.Condition()
        self._closing, self._last_closed, self.closed_at = -1, -1, 0.0
        began = time.monotonic()
        self.groups = Groups.start(
            rendezvous=self._rendezvous,
            prefix="groups/0",
            rank=rank.number,
            world_size=rank.size,
            device_backend=patches.platform().backend,
            alone=False,
            on_failure=self._on_failure,
            timeout_s=timeout_s,
        )
        self.made_s = time.monotonic() - began
        threading.Thread(target=self._follow, daemon=True).start()

    def reduce(self, group=None, error: float = 0.0) -> None:
        """Sum a tensor over a group (None: all ranks), and wait until the result is there. ``error`` is added to an
        element of it.

        Raises:
            FtError: the result is wrong, or the epoch was closed.
        """
        expected = sum(range(1, self._rank.size + 1))
        tensor = torch.full((_ELEMENTS,), float(self._rank.number + 1), device=self.device)
        try:
            dist.all_reduce(tensor, group=group)
            tensor[_ELEMENTS // 2] += error
            low, high = tensor.min().item(), tensor.max().item()  # waits for the device
        except RuntimeError:  # a device may report an aborted operation in this way
            self._leave_if_closed()
            raise
        if self._closing >= self.epoch or not low == high == expected:  # an aborted operation gives any result
            self._leave_if_closed()
            raise FtError(f"an all-reduce gave {low:g} to {high:g} instead of {expected}")

    def _leave_if_closed(self) -> None:
        with self._closed:
            if self._closed.wait_for(lambda: self._last_closed >= self.epoch, _LATE_S):
                raise EpochClosed(self.epoch, "self-test")

    def wait_closed(self) -> float:
        """Wait until the epoch is closed; return the monotonic time at which this was requested."""
        epoch = self.epoch
        with self._closed:
            if not self._closed.wait_for(lambda: self._last_closed >= epoch, _CLOSED_S):
                raise FtError(f"nobody closed epoch {epoch} within {_CLOSED_S:.0f} s")
        return self.closed_at

    def renew(self) -> float:
        """Drop all groups after the epoch was closed, and make them again; return the seconds that this took."""
        began = time.monotonic()
        self.wait_closed()
        self.groups.drop()
        self._rank.meet(f"dropped {self.epoch}")
        self.epoch += 1
        names = [report.name for report in self.groups.reports()]
        self.groups.rebuild(names, [], f"groups/{self.epoch}", self.epoch)
        self.groups.reopen(self.epoch)
        return time.monotonic() - began

    def _on_failure(self, group: str, error: BaseException) -> None:
        print(f"{time.monotonic():.3f} group {group}: {error}", flush=True)
        self.wait_closed()

    def _follow(self) -> None:
        store, epoch = StoreConnection(self._rank.address, TOKEN, 3600.0), 0
        with contextlib.suppress(ConnectionError):  # the check has ended, and the store with it
            while True:
                store.get(f"close/{epoch}")
                self._closing, self.closed_at = epoch, time.monotonic()
                self.groups.close(epoch, "self-test")
                with self._closed:
                    self._last_closed = epoch
                    self._closed.notify_all()
                epoch += 1


def _read(path: Path) -> str:
    deadline = time.monotonic() + _STORE_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise FtError(f"{path} did not appear")
        time.sleep(_POLL_S)
    return path.read_text()
