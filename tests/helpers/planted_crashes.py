"""Folders of crashed runs, made by hand: events, journal and logs as ``ft run`` writes them."""

import json
from pathlib import Path
from typing import Any

from histories import START, History

from ft.base import events

USERS = """\
Traceback (most recent call last):
  File "train.py", line 18, in <module>
    train()
  File "train.py", line 15, in train
    check_batch(step)
  File "train.py", line 8, in check_batch
    raise ValueError(f"sample {sample} of step 3 has no tokens")
ValueError: sample 17 of step 3 has no tokens
"""
GLOO = """\
Traceback (most recent call last):
  File "train.py", line 16, in train
    dist.all_reduce(gradient)
  File "distributed_c10d.py", line 3252, in all_reduce
    work.wait()
RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:47538.
"""
NCCL_TIMEOUT = """\
Traceback (most recent call last):
  File "train.py", line 16, in train
    work.wait()
torch.distributed.DistBackendError: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
"""
SEGFAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f6372e50b80 (most recent call first):
  File "train.py", line 12 in check_batch
  File "train.py", line 18 in <module>

Extension modules: numpy, torch._C (total: 21)
"""


class CrashedRun(History):
    """A run of four ranks in one folder; ``folder`` is written by ``write``."""

    def __init__(self, folder: Path, world_size: int = 4):
        super().__init__(world_size)
        self.folder = folder
        self.entries: list[dict[str, Any]] = []
        self.logs = dict.fromkeys(self.seats.values(), "step 1\nstep 2\n")
        for rank, worker in self.seats.items():
            self.say(0.5, events.WORKER_STARTED, node="n0", worker=worker, rank=int(rank), pid=100 + int(rank))

    def standby(self, worker: str) -> None:
        self.logs[worker] = ""
        self.say(0.6, events.WORKER_STARTED, node="n0", worker=worker, pid=200)

    def log(self, rank: int, text: str) -> None:
        """Append to the log of a rank."""
        self.logs[self.seats[str(rank)]] += text

    def report(self, at: float, kind: str, *orders: dict, **values: Any) -> None:
        """Add an entry to the journal, with the orders that follow from it."""
        decisions = [{"reason": "", "orders": list(orders)}] if orders else []
        self.entries.append({"wall": START + at, "now": at, "report": {"kind": kind, **values}, "decisions": decisions})

    def exits(self, at: float, rank: int, code: int, *orders: dict) -> None:
        worker = self.seats[str(rank)]
        self.report(at, "WorkerExited", *orders, worker=worker, node="n0", code=code, attached=False)

    def fails(self, at: float, rank: int, kinds: list[str], message: str, trace: str = "", *orders: dict) -> None:
        place = {"worker": self.seats[str(rank)], "epoch": self.epoch, "step": 2}
        self.report(at, "WorkerFailed", *orders, **place, kinds=kinds, message=message, trace=trace)

    def stop(self, at: float, code: int = 1, message: str = "it ended") -> None:
        self.say(at, events.STOPPED, code=code, message=message)

    def write(self) -> Path:
        (self.folder / "logs").mkdir(parents=True)
        with events.EventLog(self.folder / "events.jsonl") as log:
            for event in self.events:
                log.write(event)
        journal = "".join(json.dumps(entry) + "\n" for entry in self.entries)
        (self.folder / "journal.jsonl").write_text(journal)
        for worker, text in self.logs.items():
            (self.folder / "logs" / f"{worker}.log").write_text(text)
        return self.folder


STOP = {"kind": "Stop", "code": 1, "message": ""}
RESTART = {"kind": "Restart", "number": 1, "reason": "", "ranks": {}}
