"""A node's membership in an ``ft run``: its unique name, and the workers and store that it offers when it joins."""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft.base import threads
from ft.base.errors import FtError, UserError
from ft.job.agent.devices import Devices
from ft.job.agent.environment import NodeContext
from ft.job.agent.options import RunOptions
from ft.job.control.start_checks import MISSING, OUTPUT, THERE
from ft.job.messages import AgentJoined
from ft.platform import election, network, shared_state
from ft.record.run import read_status

_INPUTS = (
    *("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path", "--per-split-data-args-path"),
    *("--data-args-path", "--load", "--pretrained-checkpoint", "--tokenizer-model", "--vocab-file", "--merge-file"),
)
_OUTPUTS = ("--save",)
_ENDINGS = ("", ".bin", ".idx")
"""A data set is given by the beginning of the names of its two files."""


def describe(options: RunOptions) -> dict[str, Any]:
    """Return the fields of ``AgentJoined`` that say how this node is set up.

    The call takes a part of a second, because it reads the versions of the installed packages.
    """
    from ft.platform.releases import versions

    cluster = options.cluster
    return {
        "machine": socket.gethostname(),
        "interfaces": network.interfaces(),
        "about": {**versions(), "--nnodes": str(cluster.nnodes), "--standby-nodes": str(cluster.standby_nodes)},
        "paths": paths(options.script.args),
        "clock": time.time(),
    }


def paths(words: Sequence[str]) -> dict[str, str]:
    """Return the paths of a command line, each with its flag, and whether this node has them.

    For a folder that the run writes, it is the folder above that is looked for: the run creates the folder itself.
    """
    outputs = {value for flag, value in _values(words) if flag in _OUTPUTS}
    found = {}
    for flag, value in _values(words):
        if flag in _INPUTS and value not in outputs and not _is_number(value):
            found[f"{flag} {value}"] = THERE if any(os.path.exists(value + end) for end in _ENDINGS) else MISSING
        elif flag in _OUTPUTS:
            above = os.path.dirname(os.path.abspath(value))
            found[f"{OUTPUT}{flag} {value}"] = THERE if os.path.isdir(above) else MISSING
    return found


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) for the values of the flags that name paths; some flags have several values."""
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if equals:
                yield flag, value
        elif flag in (*_INPUTS, *_OUTPUTS):
            yield flag, word


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_FOLDER = "nodes"
_MANY_KEYS = 20_000


def claim_name(run_dir: Path, node_rank: int, joins: bool = True) -> str:
    """Return a name that no agent of this run has had: ``n3``, or ``n3-2``, ``n3-3`` for agents that join again.

    A name is claimed by creating a value in the run's shared state, which can succeed only once.

    Args:
        joins: whether the node's latest ``ft run`` may still be at work.

    Raises:
        OSError: the shared state cannot be written.
        UserError: the node's latest ``ft run`` is still at work, and not ``joins``.
    """
    state, mine = shared_state.of(run_dir), election.holder(os.getpid(), run_dir).encode()
    name = f"n{node_rank}"
    for turn in itertools.count(2):
        if state.create(f"{_FOLDER}/{name}", mine):
            return name
        last, name = name, f"n{node_rank}-{turn}"
        if not joins and state.get(f"{_FOLDER}/{name}") is None:
            _refuse_second(run_dir, last, state.get(f"{_FOLDER}/{last}") or b"")
    raise AssertionError("the loop has no end")


def _refuse_second(run_dir: Path, name: str, held: bytes) -> None:
    """Raise an error if the process that holds the name of a node is at work. A name without a holder is free.

    The system knows it of a process of this host, the run's status and lease of another one.

    Raises:
        UserError: it is at work.
    """
    holder = election.decode_holder(held)
    if holder is None or holder.lives is False:
        return
    nodes = read_status(run_dir).get("nodes")
    state = str(nodes.get(name, "up") if isinstance(nodes, dict) else "up")
    if holder.lives is None and not (state.startswith(("up", "suspect")) and election.is_kept(run_dir)):
        return
    number = name.removeprefix("n").partition("-")[0]
    raise UserError(
        f"{run_dir} is the directory of a run that is under way, whose node {number} is at work: {holder}",
        "choose another --run-dir; to join that run as a spare, add --join; each node of a run needs a --node-rank of "
        "its own",
    )


class Membership:
    """The present role of this agent in the run.

    Args:
        place: properties of this node, with the agent's first name.

    Attributes:
        place: properties of this node, which its workers have in common.
        is_late: whether the agent joins a run that is under way, and therefore offers standbys only.
    """

    def __init__(self, place: NodeContext, devices: Devices):
        self.place, self._devices = place, devices
        self.is_late = place.options.life is None and place.node != f"n{place.options.cluster.node_rank}"
        self._store_server: Any = None
        self._token = ""

    def come_back(self) -> None:
        """Take a new name and offer standbys only, after the control plane has removed this node from the run.

        Raises:
            OSError: the shared state cannot be written.
        """
        options = self.place.options
        self.place = replace(self.place, node=claim_name(options.run_dir, options.cluster.node_rank))
        self.is_late = True

    def join(self, token: str) -> AgentJoined:
        """Open a store in which process groups can rendezvous, and return the message that describes this node.

        The call imports torch, which takes seconds: make it from a thread other than the event loop's.

        Args:
            token: the run's secret token, which clients of the store must know.
        """
        # torch must not report the end of the control plane's store at the terminal
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from ft.net.store import StoreServer

        if self._store_server is not None:
            self._store_server.close()
        place, self._token = self.place, token
        self._store_server = StoreServer(place.host, 0, token)
        options, address = place.options, self._store_server.address
        seats, standbys = options.nproc if options.cluster.trains else 0, options.standbys_here
        if self.is_late:
            seats, standbys = 0, max(seats, standbys)
        rank, domains = options.cluster.node_rank, dict(options.domains)
        joined = AgentJoined(place.node, rank, place.host, seats, standbys, address, domains)
        return replace(joined, **self._devices.described(), **describe(options))

    def sweep(self, epoch: int) -> None:
        """Remove old rendezvous keys from this node's store, in a thread, if it holds more than ``_MANY_KEYS``.

        Keys are grouped by epoch, the version of the assignment of workers to ranks. Keys of the present epoch
        (``epoch``) and of the one before are kept.
        """
        if self._store_server is not None:
            given = self._store_server.address, self._token, epoch - 1
            with contextlib.suppress(OSError):  # a later epoch sweeps
                threads.start(_sweep, given)


def _sweep(address: str, token: str, before: int) -> None:
    from ft.net.store import StoreConnection

    # The server may end, and old releases of torch cannot list keys.
    with contextlib.suppress(ConnectionError, FtError), contextlib.closing(StoreConnection(address, token)) as store:
        for key in store.list_keys() if store.num_keys() > _MANY_KEYS else ():
            epoch = key.removeprefix("groups/").partition("/")[0]
            if key.startswith("groups/") and epoch.isdecimal() and int(epoch) < before:
                store.delete_key(key)
