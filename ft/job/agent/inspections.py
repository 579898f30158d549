"""Stores what the workers of this node are doing when a run hangs (order ``Inspect``), and tells the control plane.

Each worker answers on a thread of its own. Of a worker that does not answer, because it is stopped or holds the
interpreter lock, the operating system says what its threads do; and if its lock is held, it still writes their Python
calls (:mod:`ft.platform.processes`).
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.base import files, threads
from ft.faults.hang import inspection as calls
from ft.faults.hang.inspection import DEAD, RUNNING, STOPPED, Rank, Thread, united
from ft.job.messages import Inspect, Inspected, InspectionAnswered
from ft.net.codec import to_json
from ft.platform import network, processes
from ft.platform.processes import Handler
from ft.record import inspections as record

_WAIT_S = 0.6
"""Seconds for the answers; a process that runs answers within a few milliseconds."""
_STORE_S = 1.0
_CALLS = 8
"""Number of innermost calls of a training thread that the control plane gets."""


@dataclass
class _OpenInspection:
    """An order to say what the workers of this node are doing, and the answers that have arrived so far.

    Attributes:
        wall: when it arrived, in seconds since 1970.
        until: monotonic time after which nobody is waited for.
        silent: worker -> what the operating system said of it when the order arrived.
        handlers: worker -> pid of its process, and the handler by which its stacks can be read.
        answers: worker -> its answer.
    """

    order: Inspect
    wall: float
    until: float
    silent: dict[str, Rank]
    handlers: dict[str, tuple[int, Handler]] = field(default_factory=dict)
    answers: dict[str, Inspected] = field(default_factory=dict)


class Inspections:
    """Asks the workers of one node what they are doing, and stores their answers in the run's folder.

    Call ``poll`` in every round of the agent's event loop: it stores what is complete or overdue.
    """

    def __init__(self, folder: Path, node: str, post: Callable[[InspectionAnswered], None] = lambda report: None):
        self._folder, self._node, self._post = folder, node, post
        self._open: _OpenInspection | None = None
        self._writer: threading.Thread | None = None

    def begins(
        self, order: Inspect, pids: Mapping[str, int | None], handlers: Mapping[str, Handler] | None = None
    ) -> None:
        """Begin to collect answers, and ask the operating system about all workers.

        Args:
            handlers: worker -> handler by which its stacks can be read, for those that have one.
        """
        self.finish()
        ranks = {worker: rank for rank, worker in order.seats.items() if worker in pids}
        silent = {worker: of_the_system(rank, worker, self._node, pids[worker]) for worker, rank in ranks.items()}
        known = handlers or {}
        readable = {name: (pid, known[name]) for name in ranks if name in known and (pid := pids[name]) is not None}
        self._open = _OpenInspection(order, time.time(), time.monotonic() + _WAIT_S, silent, readable)

    @property
    def is_complete(self) -> bool:
        """Return whether no answer is missing of a worker that can give one."""
        seen = self._open
        if seen is None:
            return True
        awaited = {worker for worker, said in seen.silent.items() if said.process == RUNNING}
        return awaited <= seen.answers.keys()

    def heard(self, answer: Inspected) -> None:
        """Take the answer of a worker."""
        if self._open is not None and answer.number == self._open.order.number:
            self._open.answers[answer.worker] = answer

    def poll(self) -> None:
        """Store the inspection if all have answered or the time is up."""
        if self.is_complete or (self._open is not None and time.monotonic() > self._open.until):
            self.finish()

    def finish(self) -> None:
        """Store the inspection with the answers that there are, and send it to the control plane.

        Of the stacks, only the innermost calls of training threads are sent: the search for the cause needs no others.
        """
        seen, self._open = self._open, None
        if seen is None or not seen.silent:
            return
        said = self._values(seen)
        said["ranks"] = [{**rank, "threads": _innermost(rank.get("threads", ()))} for rank in said["ranks"]]
        self._post(InspectionAnswered(self._node, seen.order.number, said))
        _add_stacks(seen)
        path = record.path(self._folder, seen.order.number, self._node)
        # Not in the agent's own thread: the storage may be what hangs.
        with contextlib.suppress(OSError):  # it is not stored; the control plane has it
            self._writer = threads.start(_store, (path, self._values(seen)), "ft-inspection")

    def close(self) -> None:
        """Store the inspection, and wait a moment until it is stored."""
        self.finish()
        if self._writer is not None:
            self._writer.join(_STORE_S)

    def _values(self, seen: _OpenInspection) -> dict[str, Any]:
        silent = [to_json(rank) for worker, rank in seen.silent.items() if worker not in seen.answers]
        answers = list(seen.answers.values())
        groups = {name: members for answer in answers for name, members in answer.groups.items()}
        across = united(answer.across for answer in answers)
        said = [answer.said for answer in answers]
        order = seen.order
        values = {"number": order.number, "why": order.why, "wall": seen.wall, "node": self._node}
        values |= {"seats": order.seats, "groups": to_json(groups), "across": to_json(across)}
        return {**values, "ranks": [*said, *silent]}


def _innermost(threads: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "frames": list(one.get("frames", ()))[:_CALLS]} for one in threads if one.get("trains")]


def _add_stacks(seen: _OpenInspection) -> None:
    """Add the Python calls of workers that run and have not answered."""
    mute = [worker for worker, said in seen.silent.items() if said.process == RUNNING and worker not in seen.answers]
    asked = {worker: seen.handlers[worker] for worker in mute if worker in seen.handlers}
    for worker, text in processes.stacks_of(asked).items():
        pid, handler = asked[worker]
        threads = calls.read_stacks(text, handler.thread, processes.folder(pid))
        said = seen.silent[worker]
        seen.silent[worker] = replace(said, threads=calls.with_kernel(threads, said.threads))


def of_the_system(rank: int, worker: str, node: str, pid: int | None) -> Rank:
    """Return what the operating system says of a process.

    Args:
        pid: its pid; None if it has ended.
    """
    letter = processes.state(pid) if pid is not None else "X"
    process = STOPPED if letter in "Tt" else DEAD if letter in "ZX" else RUNNING
    tasks = processes.tasks(pid) if pid is not None else []
    threads = tuple(Thread(name, (), at == 0, state) for at, (name, _, state) in enumerate(tasks))
    return Rank(rank, worker, node, process, answers=False, threads=threads)


def _store(path: Path, values: dict[str, Any]) -> None:
    round_trip_s = network.round_trip_s()
    values["ranks"] = [{**said, "round_trip_s": round_trip_s} for said in values["ranks"]]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, json.dumps(values, separators=(",", ":")))
    except OSError as error:  # the diagnosis is lost; nothing else depends on it
        print(f"ft: an inspection of the workers cannot be stored: {error}", flush=True)
