"""The worker of hangs_real.py: carries out the program of a layout with real process groups, and its fault.

The programs are those of ``tests/simulation/hangs``; every operation is started from the line that the program names,
by a function that is compiled with this file name and line.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ft
from ft.faults.hang.look import DEAD, RECV, SEND, STOPPED
from ft.job.messages import WorkerResumed
from ft.state.groups import history
from tests.simulation.hangs.faults import STEP
from tests.simulation.hangs.machine import Call

COMPUTE_S = 0.004
LINK_S = 0.2


class Executor:
    """Carries out the batches of one rank."""

    def __init__(self, programs, wrong, rank: int):
        self.programs, self.wrong, self.rank = programs, wrong, rank
        self.groups = {name: dist.new_group(list(ranks)) for name, ranks in sorted(programs.groups.items())}
        self.calls: dict[str, object] = {}
        self.background: list = []

    def step(self, number: int) -> None:
        wrong = self.wrong.get(self.rank)
        changed = wrong is not None and wrong.program is not None and number == STEP
        for at, batch in enumerate(wrong.program if changed else self.programs.steps[self.rank]):
            self.compute(wrong, (number, at))
            works = [(call, self.start(call)) for call in batch]
            if wrong is not None and wrong.at == (number, at) and wrong.inside:
                halt(wrong)
            for call, work in works:
                if call.awaited:
                    work.wait()
                else:
                    self.background.append(work)
        for work in self.background:
            work.wait()
        self.background = []

    def compute(self, wrong, here: tuple[int, int]) -> None:
        if wrong is None:
            time.sleep(COMPUTE_S)
            return
        if wrong.at == here and not wrong.inside:
            halt(wrong)
        if wrong.slower > 1 and not wrong.answers:
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(40 * COMPUTE_S * wrong.slower * 1e6 / 10)))
        else:
            time.sleep(COMPUTE_S * wrong.slower * (4 if wrong.slower > 1 else 1))

    def start(self, call: Call):
        """Start an operation from the line that the program names."""
        if call.site not in self.calls:
            file, _, rest = call.site.partition(":")
            line, _, name = rest.partition(" ")
            source = "\n" * (int(line) - 1) + f"def {name.split()[0]}(operation): return operation()"
            scope: dict = {}
            exec(compile(source, file, "exec"), scope)
            self.calls[call.site] = scope[name.split()[0]]
        return self.calls[call.site](lambda: self.operation(call))

    def operation(self, call: Call):
        group, members = self.groups[call.group], self.programs.groups[call.group]
        tensor = torch.ones(call.sizes[0][1])
        if call.name == SEND:
            return dist.isend(tensor, call.peer, group=group)
        if call.name == RECV:
            return dist.irecv(tensor, call.peer, group=group)
        if call.name == "all_reduce":
            return dist.all_reduce(tensor, group=group, async_op=True)
        if call.name == "broadcast":
            return dist.broadcast(tensor, members[0], group=group, async_op=True)
        if call.name == "all_gather":
            return dist.all_gather([torch.empty_like(tensor) for _ in members], tensor, group=group, async_op=True)
        if call.name == "reduce_scatter":
            parts = [torch.ones_like(tensor) for _ in members]
            return dist.reduce_scatter(tensor, parts, group=group, async_op=True)
        even = torch.ones(len(members) * 4)
        return dist.all_to_all_single(torch.empty_like(even), even, group=group, async_op=True)


def halt(wrong) -> None:
    """Stop for ever, in the way that the fault says."""
    if wrong.state == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    if wrong.state == DEAD:
        os.kill(os.getpid(), signal.SIGKILL)
    if not wrong.answers:
        while True:
            ctypes.PyDLL(None).usleep(ctypes.c_uint(1_000_000))
    HALTS[place(wrong.frames[0])]()


def place(frame: str) -> str:
    names = {"dataloader": "data", "threading": "lock", "serialization": "storage", "streams": "kernel"}
    return next((kind for part, kind in names.items() if part in frame), "user")


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_a_read() -> None:
    path = f"/tmp/hang-{os.getpid()}"
    os.mkfifo(path)
    torch.load(path)


class Endless(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: int):
        time.sleep(3600)


HALTS = {
    "user": lambda: time.sleep(3600),
    "lock": in_a_lock,
    "storage": in_a_read,
    "data": lambda: next(iter(torch.utils.data.DataLoader(Endless(), num_workers=1))),
    "kernel": lambda: ctypes.CDLL(None).pause(),
}


def main() -> None:
    # The line of a call is that of the program, not the one of this file in which all calls are made.
    history._LIBRARIES = (*history._LIBRARIES, Path(__file__).name)
    with open(sys.argv[1], "rb") as file:
        programs, injected, steps = pickle.load(file)  # written by hangs_real.py just before
    session = ft.worker.session.attach()
    session.init_process_group("gloo")
    executor = Executor(programs, injected.wrong, session.rank)
    session.send(WorkerResumed(session.worker, session.epoch, 0))
    session.progress.epoch = session.epoch
    for number in range(steps):
        session.progress.begins(number)
        executor.step(number)
    session.progress.idles("done")
    time.sleep(3600)


if __name__ == "__main__":
    main()
