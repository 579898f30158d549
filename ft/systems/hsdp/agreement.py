"""Agreement of an FT-HSDP replica's ranks on the quorum of each step, in the background of the computation.

The leader (rank 0 of the replica) asks the quorum server for it and broadcasts the answer to all ranks of its replica.
Each rank has a row of addresses, at which the same rank of other replicas can connect to its all-reduce ring and to its
state server; the rows are broadcast together with the quorum.
"""

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from ft.base import bounded_json
from ft.base.errors import FtError
from ft.job.quorum import Quorum, QuorumClient, Report
from ft.net.codec import from_json
from ft.state.groups.tree import Tree
from ft.systems.hsdp.protocol import Agreed, Question

THREAD = "ft-hsdp-agreement"
"""Name of the agreement thread."""
_ROW_BYTES = 512


class Agreement:
    """The agreement thread of one rank: it obtains and broadcasts quorums while the training thread computes.

    Args:
        row: addresses of this rank, {"ring": "host:port", "fetch": "host:port"}.
    """

    def __init__(self, tree: Tree, row: dict[str, str]):
        self._tree, self._row = tree, row
        self._client: QuorumClient | None = None
        self.is_awaited = False
        self._told = threading.Condition()
        self._number = 0
        self._answer: Agreed | None = None  # answer to the last question
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._rows: dict[int, tuple[int, list[dict[str, str]]]] = {}  # replica -> (life number of its workers, rows)
        self._thread: threading.Thread | None = None

    def begin(self, client: QuorumClient | None, steps: int = 0) -> None:
        """Begin a life of the replica: tell the quorum server the addresses of its ranks, and start the thread.

        All ranks of the tree have to call it at the same time; after :meth:`end`, they can call it again.

        Args:
            client: quorum client of this life on the leader, which is rank 0 of the tree; None on other ranks.
            steps: number of committed steps in the state of the replica, 0 if it has none.
        """
        self._client, self._rows, self._asked = client, {}, queue.SimpleQueue()
        rows = _gather(self._tree, self._row)
        if client is not None:
            client.hello(rows, steps)
        self._thread = threading.Thread(target=self._run, args=(self._asked,), name=THREAD, daemon=True)
        self._thread.start()

    def ask(self, question: Question, then: Callable[[Question, Agreed], None]) -> None:
        """Begin to ask for the quorum of a step; must be called on all ranks of the replica. Return at once.

        Args:
            then: called on the agreement thread with the question and its answer, before :meth:`wait` returns.
        """
        with self._told:
            self._number, self._answer = self._number + 1, None
            self._asked.put((self._number, question, then))

    def wait(self) -> Agreed:
        """Return the answer to the last question. The client's time limits ensure that there is one."""
        with self._told:
            self.is_awaited = True
            self._told.wait_for(lambda: self._answer is not None)
            self.is_awaited = False
            return self._answer

    def close(self) -> None:
        self._asked.put(None)

    def end(self) -> None:
        """End the thread, and return when it has ended. Its operations must have failed, or be about to."""
        self.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, asked: queue.SimpleQueue) -> None:
        while (item := asked.get()) is not None:
            number, question, then = item
            try:
                agreed = self._agree(question.report)
                then(question, agreed)
            except Exception as error:  # another rank has failed; the replica's control plane restarts the replica
                agreed = Agreed(None, {}, f"{type(error).__name__}: {error}")
                then(question, agreed)
            with self._told:
                if number == self._number:  # ``then`` may have asked the next question already
                    self._answer = agreed
                    self._told.notify_all()

    def _agree(self, report: Report) -> Agreed:
        content = b"" if self._client is None else json.dumps(self._find_out(report)).encode()
        values = bounded_json.loads(_broadcast(self._tree, content), non_finite=True)
        if "problem" in values:
            return Agreed(None, {}, values["problem"])
        quorum = from_json(Quorum, values["quorum"])
        for replica, rows in values["rows"].items():
            self._rows[int(replica)] = (quorum.lives[int(replica)], rows)
        return Agreed(quorum, {replica: self._rows[replica][1] for replica in quorum.members})

    def _find_out(self, report: Report) -> dict[str, Any]:
        """Ask for the quorum, on the leader, and fetch the rows of members that are new or were restarted.

        A restart of a replica's workers begins another life, with a new number and new addresses.
        """
        try:
            quorum = self._client.ask(report).result()
            lives = quorum.lives
            new = [r for r in quorum.members if r not in self._rows or self._rows[r][0] != lives[r]]
            rows = {str(replica): self._client.rows(replica, lives[replica]) for replica in new}
        except FtError as error:
            return {"problem": str(error)}
        return {"quorum": asdict(quorum), "rows": rows}


def _gather(tree: Tree, row: dict[str, str]) -> list[dict[str, str]]:
    """Return the rows of all ranks by rank, on rank 0; an empty list elsewhere."""
    text = json.dumps(row).encode().ljust(_ROW_BYTES)
    rows = tree.gather(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    return [] if rows is None else [bounded_json.loads(row.numpy().tobytes(), non_finite=True) for row in rows]


def _broadcast(tree: Tree, content: bytes) -> bytes:
    """Broadcast ``content`` from rank 0, and return it on every rank."""
    size = torch.tensor([len(content)], dtype=torch.int64, device="cpu")
    tree.broadcast(size)
    words = torch.frombuffer(bytearray(content or bytes(size.item())), dtype=torch.uint8)
    tree.broadcast(words)
    return words.numpy().tobytes()
