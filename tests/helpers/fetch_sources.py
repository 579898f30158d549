"""Parts for tests of the catch-up: states, and sources in processes of their own."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from waiting import eventually

from ft.state.fetch import StateServer

TOKEN = "the token of this run"
STEP, LINEAGE = 7, 3
WAIT_S = 30.0


def state(seed: int, mib: float = 1.0) -> dict[str, torch.Tensor]:
    """Return tensors of many types and shapes, the largest of ``mib`` MiB."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(max(1, int(mib * (1 << 18))), generator=numbers),
        "matrix": torch.randn(33, 1021, generator=numbers).to(torch.bfloat16),
        "scalar": torch.randn((), generator=numbers),
        "empty": torch.zeros(0, 5),
        "steps": torch.randint(-(2**62), 2**62, (3, 5, 7), generator=numbers),
        "mask": torch.rand(1001, generator=numbers) < 0.5,
        "double": torch.randn(17, generator=numbers, dtype=torch.float64),
        "half": torch.randn(3, generator=numbers).to(torch.float16),
        "bytes": torch.randint(0, 256, (65,), generator=numbers, dtype=torch.uint8),
        "eight": torch.randn(64, generator=numbers).to(torch.float8_e4m3fn),
        "none": torch.zeros(0),
    }


def blank(like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are equal bit for bit."""
    pairs = [(one[name].reshape(-1), other[name].reshape(-1)) for name in one]
    return one.keys() == other.keys() and all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) for mine, theirs in pairs
    )


class Process:
    """A source in a process of its own, which serves ``live`` as the state of STEP until it is ended.

    The process is a fork, which already has the tensors and only sends their bytes.
    """

    def __init__(self, live: dict[str, torch.Tensor]):
        forks = multiprocessing.get_context("fork")
        here, there = forks.Pipe()
        self._process = forks.Process(target=_serve, args=(live, there), daemon=True)
        self._process.start()
        with here, there:
            if not here.poll(WAIT_S):
                raise TimeoutError("the source does not begin")
            self.address = here.recv()

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def close(self) -> None:
        self._process.kill()
        self._process.join(WAIT_S)
        self._process.close()


def _serve(live: dict[str, torch.Tensor], to_test) -> None:
    server = StateServer("127.0.0.1", TOKEN)
    server.offer(STEP, LINEAGE, live, {})
    to_test.send(server.address)
    while True:
        signal.pause()


def once_past(nbytes: int, act: Callable[[], None]) -> Callable[[bytes, int], bytes]:
    """Return an ``answer`` for a :class:`Proxy` that calls ``act`` once ``nbytes`` bytes have passed."""
    done = threading.Event()

    def answer(data: bytes, before: int) -> bytes:
        if before >= nbytes and not done.is_set():
            done.set()
            act()
        return data

    return answer


@pytest.fixture
def closing():
    """A stack of what has to be closed; afterwards no thread and no descriptor is left."""
    threads, before = threading.active_count(), _descriptors()
    with contextlib.ExitStack() as stack:
        yield stack
    eventually(lambda: threading.active_count() <= threads and _descriptors() <= before, "a thread or file is left")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
