"""One process of the emulation of ``ft simulate quorum``: several replicas with production clients and relays.

    python -m ft.lab.simulate.quorum.crew '{"run_dir": ..., "token": ..., "replicas": [...], "job": {...}}'

A quorum is the set of replicas that execute the next training step together. The leader of a replica (rank 0) asks the
quorum server for the quorum, and a tree of relays passes the quorum on to the replica's ranks. The emulated
ranks only count the quorums that they receive.

The process prints one JSON line with three times for every quorum and replica, in seconds on the host's monotonic
clock: when the leader asked, when the leader got the answer, and when the last rank received the quorum.
"""

import asyncio
import gc
import json
import random
import signal
import sys
import time
from array import array
from concurrent.futures import Future

from ft.base import bounded_json
from ft.base.errors import FtError
from ft.job.quorum import Limits, Quorum, QuorumClient, Report, wire
from ft.lab.simulate.quorum.shape import Job, raise_limit
from ft.lab.simulate.quorum.spread import Relay
from ft.net.codec import from_json, to_json
from ft.platform import processes

_HOST = "127.0.0.1"
_LOOK_S = 0.02
_READY_S = 120.0
_UNEVEN_S = 0.02
"""The longest random delay before a leader asks for a quorum, in seconds, because replicas do not finish their steps
simultaneously.
"""
_AWAY_S = 0.2
"""Seconds until a lost replica comes back."""


class Replica:
    """One replica: its leader's quorum client, and the relays of its nodes with their logical ranks.

    Args:
        number: number of the replica.
        job: parameters of the emulation.
        run_dir: directory in which the client finds the quorum server.
        token: secret that authenticates connections.
        loop: event loop of this process.

    Attributes:
        log: [quorum number, step, time asked, time answered, time at the last rank] of each quorum.
        is_done: whether the replica has executed all steps.
    """

    def __init__(self, number: int, job: Job, run_dir: str, token: str, loop: asyncio.AbstractEventLoop):
        self.number, self.job, self.log, self.is_done = number, job, [], False
        self._run_dir, self._token, self._loop = run_dir, token, loop
        self._draw = random.Random(f"{job.seed}.{number}")
        self._deaths = {step for step, replica in job.death_steps().items() if replica == number}
        self._ranks = job.ranks // job.replicas
        self._got = array("q", bytes(8 * self._ranks))
        self._state, self._life, self._asked = (0, -1), 0, 0.0
        self._quorum: Quorum | None = None
        self._answered_at, self._missing = 0.0, 0
        self._relays = [Relay(loop, token, self._taker(node), self._broken) for node in range(job.tree.size)]
        self.client = self._new_client()
        self._connect()

    @property
    def is_ready(self) -> bool:
        """Return whether all relays are connected to their children."""
        tree = self.job.tree
        return all(relay.children == len(tree.children(node)) for node, relay in enumerate(self._relays))

    def begin(self) -> None:
        """Announce the replica to the quorum server, and ask for the first quorum."""
        self._introduce()
        self.ask()

    def ask(self) -> None:
        """Report to the quorum server, and ask for the next quorum."""
        self._asked = time.monotonic()
        has_finished = self._state[0] >= self.job.steps
        report = Report(self.number, self._life, *self._state, step_s=0.1, finished=has_finished)
        future = self.client.ask(report)
        future.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._answer, done))

    def close(self) -> None:
        self.client.close()
        for relay in self._relays:
            relay.close()

    def check(self) -> None:
        """Check that all ranks received the same number of quorums.

        Raises:
            FtError: a rank received more or fewer quorums than the leader.
        """
        if set(self._got) != {len(self.log)}:
            raise FtError(f"replica {self.number}: {len(self.log)} quorums, but ranks had {sorted(set(self._got))}")

    def _connect(self) -> None:
        tree, addresses = self.job.tree, {}
        for node, relay in enumerate(self._relays):
            if tree.children(node):
                addresses[node] = relay.listen(_HOST)
        for node, relay in enumerate(self._relays):
            if node:
                relay.join(addresses[tree.parent(node)])

    def _new_client(self) -> QuorumClient:
        return QuorumClient(self._run_dir, self.number, self._life, self._token, Limits())

    def _introduce(self) -> None:
        host = f"10.{self.number}"
        self.client.hello(
            [
                {
                    "ring": f"{host}.{rank // 250}.{rank % 250}:40000",
                    "fetch": f"{host}.{rank // 250}.{rank % 250}:41000",
                }
                for rank in range(self._ranks)
            ]
        )

    def _answer(self, done: Future) -> None:
        quorum, self._answered_at = done.result(), time.monotonic()
        if quorum.finished:
            self.client.leave("done")
            self.is_done = True
            return
        self._quorum, self._missing = quorum, self.job.tree.size
        self._relays[0].publish({"kind": "quorum", "quorum": to_json(quorum)})

    def _taker(self, node: int):
        first, end = node * self.job.node, min((node + 1) * self.job.node, self.job.ranks // self.job.replicas)

        def take(body: bytes) -> None:
            """Count the quorum for all ranks of the node.

            The message is parsed once for the node, while in a real run each rank parses it on its own core.
            """
            quorum = from_json(Quorum, wire.unpack(body)["quorum"])
            if quorum.number != self._quorum.number:
                raise FtError(f"node {node} was given quorum {quorum.number} in place of {self._quorum.number}")
            for rank in range(first, end):
                self._got[rank] += 1
            self._missing -= 1
            if not self._missing:
                self._complete(quorum)

        return take

    def _complete(self, quorum: Quorum) -> None:
        self.log.append([quorum.number, quorum.step, self._asked, self._answered_at, time.monotonic()])
        self._state = (0, 0) if quorum.load else (quorum.step + 1, quorum.number)
        if quorum.step in self._deaths:
            self._deaths.discard(quorum.step)
            self._loop.call_soon(self._die)
        else:
            self._loop.call_later(self._draw.uniform(0.0, _UNEVEN_S), self.ask)

    def _die(self) -> None:
        """Close the leader's connection without a message; later, reconnect as a restarted replica without state."""
        self.client.close()
        self._life, self._state = self._life + 1, (0, -1)
        self.client = self._new_client()
        self._loop.call_later(_AWAY_S, self.begin)

    def _broken(self, reason: str) -> None:
        raise FtError(f"replica {self.number}: {reason}")


async def play(words: dict) -> list[dict]:
    """Run all replicas of this process until they have finished, and return their logs.

    Args:
        words: values of the process's JSON argument.

    Raises:
        FtError: relays do not connect, or a replica fails.
    """
    loop, job = asyncio.get_running_loop(), Job(**words["job"])
    failures: list[str] = []
    loop.set_exception_handler(lambda _, context: failures.append(str(context.get("exception", context))))
    replicas = [Replica(number, job, words["run_dir"], words["token"], loop) for number in words["replicas"]]
    deadline = time.monotonic() + _READY_S
    while not all(replica.is_ready for replica in replicas):
        if time.monotonic() > deadline:
            raise FtError("the relays are not connected after 2 minutes")
        await asyncio.sleep(_LOOK_S)
    gc.collect()
    gc.freeze()  # thousands of relays live as long as the process, so the garbage collector can skip them
    for replica in replicas:
        replica.begin()
    while not all(replica.is_done for replica in replicas) and not failures:
        await asyncio.sleep(_LOOK_S)
    if failures:
        raise FtError(failures[0])
    for replica in replicas:
        replica.check()
        replica.close()
    return [{"replica": replica.number, "log": replica.log} for replica in replicas]


def main() -> None:
    """Run the replicas that the command-line argument names, and print their logs as JSON."""
    processes.die_with_parent(signal.SIGKILL)
    raise_limit()
    print(json.dumps(asyncio.run(play(bounded_json.loads(sys.argv[1], non_finite=True)))))


if __name__ == "__main__":
    main()
