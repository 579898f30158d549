"""How the nodes of a self-test work together: node 0 says which check is next, and every node runs it.

They meet in a store on node 0 (``ft.net.store``). The other nodes ask it again and again instead of waiting in it, so
that they also see a signal.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ft.base import bounded_json, token
from ft.base.errors import UserError
from ft.lab.selftest.values import FAIL, Result
from ft.platform import network
from ft.platform.slurm import SlurmJob

_ASK_S, _JOIN_S, _GRACE_S, _STORE_S = 0.1, 120.0, 20.0, 60.0
_INTERACTIVE_STEP = "4294967290"
"""Number of the job step in which Slurm runs the shell of ``salloc`` (SLURM_INTERACTIVE_STEP in slurm.h)."""


@dataclass(frozen=True)
class Place:
    """This node's place among the nodes of the self-test.

    Attributes:
        node: number of this node, from 0.
        nnodes: number of nodes.
        host: host of node 0.
        port: port of the store on node 0.
    """

    node: int = 0
    nnodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0


class Nodes:
    """The other nodes, seen from one node. With one node, nothing is connected.

    Attributes:
        place: this node's place.
        host: address at which the other nodes reach this one.
        names: names of the nodes, in order; on other nodes than node 0 only this one's.
        address: address of the store, "" with one node.
        token: the shared secret of the nodes.
    """

    def __init__(self, place: Place, run_dir: Path, turn: Callable[[], None]):
        self.place, self._turn = place, turn
        self.host, self.address, self.token = "127.0.0.1", "", "selftest"
        self.names = [os.uname().nodename]
        self._lost: set[int] = set()  # nodes that did not answer once are not waited for again
        self._server: Any = None
        if place.nnodes > 1:
            self._connect(run_dir)

    def _connect(self, run_dir: Path) -> None:
        from ft.net.store import StoreConnection, StoreServer  # imports torch, which one node alone does not need here

        place = self.place
        self.host = network.own_address(place.host, place.port, place.node == 0)
        if place.node == 0:
            self.token = token.make(run_dir)
            self._server = StoreServer(place.host, place.port, self.token)
            self.address = self._server.address
            self._store = StoreConnection(self.address, self.token, _STORE_S)
        else:
            self.token, self.address = token.find(run_dir, _JOIN_S), f"{place.host}:{place.port}"
            self._store = self._joined(StoreConnection)
        self._store.set(f"name/{place.node}", self.names[0])
        if place.node == 0:
            self.names = [self._await(f"name/{node}", _JOIN_S, f"node {node}") for node in range(place.nnodes)]

    def _joined(self, connection):
        deadline = time.monotonic() + _JOIN_S
        while True:
            try:
                return connection(self.address, self.token, _STORE_S)
            except ConnectionError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"node 0 does not answer at {self.address}: {error}",
                        "start ft selftest on it too, and let this node reach that port",
                    ) from error
                self._turn()

    def _await(self, key: str, limit_s: float, who: str) -> str:
        deadline = time.monotonic() + limit_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise UserError(f"{who} has not joined within {limit_s:.0f} s", "start ft selftest on every node")
            self._turn()
        return self._store.get(key).decode()

    def close(self) -> None:
        """On node 0: end the store, whose thread must not be inside torch when the process exits: it would abort."""
        if self._server is not None:
            self._server.close()

    def announce(self, number: int, name: str, limit_s: float, is_cut: bool) -> None:
        """On node 0: tell the other nodes which check is next; the name "" ends the self-test."""
        if self.address:
            self._store.set(f"check/{number}", json.dumps([name, limit_s, is_cut]))

    def next(self, number: int) -> tuple[str, float, bool] | None:
        """On another node: return what node 0 announced, or None at the end of the self-test or of node 0."""
        try:
            while not self._store.check([f"check/{number}"]):
                self._turn()
            name, limit_s, is_cut = bounded_json.loads(self._store.get(f"check/{number}"), non_finite=True)
        except ConnectionError:  # node 0 is gone
            return None
        return (name, limit_s, is_cut) if name else None

    def report(self, number: int, result: Result) -> None:
        """On another node: send the result of a check to node 0."""
        self._store.set(f"result/{number}/{self.place.node}", json.dumps(asdict(result)))

    def collect(self, number: int, deadline: float) -> list[Result]:
        """On node 0: return the results of the other nodes; a node that does not answer has failed.

        Args:
            number: number of the check.
            deadline: monotonic time at which the nodes kill the check's processes.
        """
        found = []
        for node in range(1, self.place.nnodes):
            key = f"result/{number}/{node}"
            while not (is_there := self._store.check([key])) and time.monotonic() < deadline + _GRACE_S:
                if node in self._lost:
                    break
                self._turn()
            if is_there:
                self._lost.discard(node)
                found.append(Result(**bounded_json.loads(self._store.get(key), non_finite=True)))
            else:
                self._lost.add(node)
                fix = "look whether the node still runs; take it out of the job if it does not"
                found.append(Result(FAIL, "the node does not answer", fix, node=self.names[node]))
        return found


def is_alone_in(job: SlurmJob | None, environment) -> bool:
    """Return whether this process is the only one in a Slurm allocation of several nodes: in its script or shell."""
    if job is None:
        return False
    shell = environment.get("SLURM_STEP_ID") == _INTERACTIVE_STEP
    return (shell or not job.in_step) and int(environment.get("SLURM_JOB_NUM_NODES", job.nnodes)) > 1


def srun(nodes: int | None, environment, words: list[str]) -> list[str]:
    """Return the command that runs ``words`` once on every node of the allocation, or on the first ``nodes``."""
    number = nodes or int(environment["SLURM_JOB_NUM_NODES"])
    how = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--overlap"]
    return ["srun", f"--nodes={number}", f"--ntasks={number}", *how, *words]
