"""The first contact of an agent with the control plane: it finds out soon, with proof, that there can never be one.

An agent cannot tell a node that has not started yet from one that will never start, so it waits for that one. But if
the control plane listens and the run's directory has no token, the directory is another one than that of node 0; and if
the control plane renews its lease in the directory and its address does not answer, the address is wrong.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ft.base import bounded_json, files, threads, token
from ft.base.errors import UserError
from ft.job.messages import PeerUnreached, Reach
from ft.platform import election, network

PROOF_S = 12.0
"""Seconds for which something has to be seen before it counts as proof: longer than a busy node answers late."""
_TRY_S, _PAUSE_S = 3.0, 1.0
_FOLDER = "refused"
_SCHEME = "tcp://"


def find_token(run_dir: Path, endpoint: str, node_rank: int, patience_s: float) -> str:
    """Return the run's token, once node 0 has made it.

    Args:
        run_dir: the run's directory as this node sees it.
        endpoint: "tcp://HOST:PORT" of the control plane; "": unknown.
        patience_s: longest wait in seconds, if nothing proves before that no token will come.

    Raises:
        UserError: no token has come, or node 0 has another directory.
    """
    deadline, answers_since = time.monotonic() + patience_s, None
    while True:
        with contextlib.suppress(UserError):
            return token.find(run_dir, _PAUSE_S)
        now = time.monotonic()
        if now > deadline:
            return token.find(run_dir, 0.0)
        if not endpoint or _why_not(endpoint):
            answers_since = None
            continue
        answers_since = now if answers_since is None else answers_since
        _refresh(run_dir, node_rank)
        if now - answers_since > PROOF_S:
            raise UserError(
                f"something listens at {endpoint.removeprefix(_SCHEME)}, and {run_dir} on {socket.gethostname()} has "
                "no token: it is not the directory of node 0, or another program has that port",
                "give a --run-dir that all nodes share, and mount it on every node; or set FT_TOKEN to the same value "
                "on all nodes",
            )


def _refresh(run_dir: Path, node_rank: int) -> None:
    """Change the directory: a network file system then looks up its content again instead of remembering it."""
    mark = run_dir / f".look.{node_rank}"
    with contextlib.suppress(OSError):
        mark.touch()
        mark.unlink()


class ControlPlaneWatch:
    """Notices that the control plane is alive, and yet cannot be reached from this node.

    Args:
        run_dir: the run's directory, in which the control plane renews its lease.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._first: tuple[float, election.LeaseRecord] | None = None

    def failed(self, lease: election.LeaseRecord | None) -> None:
        """Record a failed attempt of this agent to connect to the control plane for the first time.

        Raises:
            UserError: the control plane can never be reached at its address.
        """
        now, newest = time.monotonic(), election.read(self._run_dir)
        if lease is None or newest is None or not newest.where.startswith(_SCHEME):
            return
        if self._first is None or self._first[1].where != newest.where or not _why_not(newest.where):
            self._first = now, newest
            return
        since, before = self._first
        if now - since < PROOF_S or newest.count <= before.count:
            return
        where, own = newest.where.removeprefix(_SCHEME), network.interfaces()
        raise UserError(
            f"the control plane on {newest.node} is alive, and {socket.gethostname()} cannot connect to it at {where}: "
            f"{_why_not(newest.where)}; the addresses here are "
            + ", ".join(f"{address} ({name})" for name, address in own.items()),
            "give --rdzv-endpoint an address of node 0 that all nodes reach, or have the firewall let the port through",
        )


def _why_not(where: str) -> str:
    """Return why the control plane's address does not accept a connection, "" if it does."""
    host, _, port = where.removeprefix(_SCHEME).rpartition(":")
    return network.cannot_connect(host, int(port), _TRY_S)


def leave_message(run_dir: Path, node: str, reason: str) -> None:
    """Leave the reason why this node cannot take part in the run's directory, for the agents that can."""
    with contextlib.suppress(OSError):
        (run_dir / _FOLDER).mkdir(exist_ok=True)
        files.replace(run_dir / _FOLDER / f"{node}.json", json.dumps({"node": node, "reason": reason}))


class Messages:
    """Finds the messages that other agents leave in the run's directory because they cannot take part.

    Messages that are there before belong to an earlier attempt to start a run in that directory.
    """

    def __init__(self, run_dir: Path):
        self._folder, self._next = run_dir / _FOLDER, 0.0
        self._known = {path.name for path in self._folder.glob("*")}

    def new(self) -> Iterator[tuple[str, str]]:
        """Yield (name of an agent, its reason) for each message that is new; looks at most once a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE_S
        with contextlib.suppress(OSError):
            for name in sorted(set(os.listdir(self._folder)) - self._known):
                if name.startswith("."):
                    continue
                self._known.add(name)
                with contextlib.suppress(ValueError, KeyError):
                    values = bounded_json.loads(files.read(self._folder / name))
                    yield str(values["node"]), str(values["reason"])


def reach(order: Reach, node: str, post: Callable[[PeerUnreached], None]) -> None:
    """Connect to the agent that the order assigns to this one, in a thread, and report it if that is impossible."""
    if node in order.peers:
        with contextlib.suppress(OSError):  # nothing is known of the peer then
            threads.start(_reach, (order, node, post), "ft-reach")


def _reach(order: Reach, node: str, post: Callable[[PeerUnreached], None]) -> None:
    peer = order.peers[node]
    address = order.addresses[peer]
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + PROOF_S
    while why := network.cannot_connect(host, int(port), _TRY_S):
        if time.monotonic() > deadline:
            post(PeerUnreached(node, peer, address, why))
            return
        time.sleep(_PAUSE_S)
