"""Collects the nodes' answers to a look at all workers, and finds the cause of the hang in them.

It stands before the decision function, as ``ft.job.control.pace`` does: the answers are long, so the journal gets only
what follows from them (``HangJudged``). A new control plane knows nothing of a look of the one before it.
"""

import contextlib
import queue
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ft.base.errors import UserError
from ft.faults.hang.causes import BUSY
from ft.faults.hang.format import Who
from ft.faults.hang.look import Look
from ft.faults.hang.series import over_time
from ft.job import messages as m
from ft.job.control.state import State
from ft.record import looks


class Answers:
    """The answers to the last look. The search for the cause has a thread of its own: it takes time in a large run.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path):
        self._folder, self._number = folder, 0
        self._said: dict[str, Mapping[str, Any]] = {}
        self._found: queue.SimpleQueue[m.HangJudged] = queue.SimpleQueue()

    def take(self, state: State, report: m.LookTaken) -> None:
        """Take a node's answer. When all nodes with seats have answered the last look, the search begins."""
        if report.number != state.looks:
            return
        if report.number != self._number:
            self._number, self._said = report.number, {}
        self._said[report.node] = report.said
        if {worker.node for worker in state.seated()} <= self._said.keys():
            said, self._said = list(self._said.values()), {}
            threading.Thread(target=self._judge, args=(report.number, said), name="ft-hang", daemon=True).start()

    def found(self) -> Iterator[m.HangJudged]:
        """Yield what was found since the last call."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()

    def _judge(self, number: int, said: Iterable[Mapping[str, Any]]) -> None:
        try:
            look = looks.of_parts(self._folder, said)
        except UserError as error:
            print(f"ft: look {number} is no evidence: {error}", flush=True)
            return
        self._found.put(judge(number, look))


def judge(number: int, look: Look) -> m.HangJudged:
    """Return what a look says of a hang. Of a replica's look, only its own ranks are named."""
    found, who = over_time([look]), Who(look)
    causes = [
        m.HangCause(
            sorted(_own(look, cause.guilty)),
            cause.kind,
            f"{cause.kind}: {who.title(cause.guilty)}: {cause.where if cause.kind == BUSY else cause.evidence[0]}",
        )
        for cause in found.causes
    ]
    return m.HangJudged(number, causes, sorted(_own(look, {rank for wait in found.waiting for rank in wait.ranks})))


def _own(look: Look, ranks: Collection[int]) -> set[int]:
    if not look.places:
        return set(ranks)
    return {place.rank for rank in ranks if (place := look.places.get(rank)) is not None and place.replica == look.home}
