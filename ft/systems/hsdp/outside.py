"""What a rank does with the ranks of other replicas at one moment, for the search for the cause of a hang.

A leader asks for the quorum of a step; the same ranks of all replicas of a quorum connect a ring and reduce gradients
in it; a rank that is behind fetches its state, and the others hold their update back for that. Each of these is an
operation of a group whose name and numbers are the same in all replicas (:mod:`ft.faults.hang.replicas`).
"""

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft.faults.hang.look import CONNECT, FETCH, QUORUM, SEND, SERVER, Across, Operation, channel
from ft.faults.hang.replicas import AGREEMENT, QUESTIONS
from ft.job.quorum import Quorum
from ft.job.quorum.client import View
from ft.systems.hsdp import agreement, exchange
from ft.systems.hsdp.ring import driver
from ft.worker.looks import Outside

if TYPE_CHECKING:
    from ft.systems.hsdp.components import Components

_ANSWER_S = 0.15
"""Seconds to wait for the quorum server's answer; a server that runs answers within a millisecond."""
_SILENT_S = 1.0
"""Seconds without a heartbeat of the quorum server after which it counts as silent. They come four times a second."""
FETCHES, SERVES = "its own fetch", "fetches of others"
"""What the training thread can wait for besides the quorum and the ring."""
_REDUCTION = ("megatron/patches/replicas.py", "wait")
"""(end of the file's name, function) in which the training thread waits until the ring's thread has waited for a
reduction inside the replica."""


@dataclass
class Doing:
    """What the threads of a rank note for a look.

    Attributes:
        quorums: the last quorums that the ring was connected for.
        waits_for: what the training thread waits for: ``FETCHES`` (its own fetch of the state), ``SERVES`` (replicas
            that are behind and fetch the state), or "".
    """

    quorums: deque[Quorum] = field(default_factory=lambda: deque(maxlen=3))
    waits_for: str = ""

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Return a context in which the training thread waits for ``what``."""
        self.waits_for = what
        try:
            yield
        finally:
            self.waits_for = ""


@dataclass
class _Found:
    """The parts of an ``Outside``, while they are collected."""

    replica: int
    rank: int
    operations: list[Operation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    groups: dict[str, Across] = field(default_factory=dict)

    def meets(self, group: str, replicas: Iterable[int], count: int) -> None:
        """Add a group with the same rank of these replicas, and the number of operations that were started in it."""
        self.groups[group] = Across(tuple(sorted({self.replica, *replicas})), self.rank)
        self.counts[group] = count


def outside(parts: "Components") -> Outside:
    """Return what this rank does with ranks of other replicas. Called in the thread that receives orders."""
    found = _Found(parts.place.replica, parts.session.rank)
    waits_for = parts.exchange.waits_for
    has_asked = parts.agreement.is_awaited or waits_for == exchange.QUORUM
    client = parts.client
    if client is not None:
        _question(found, client.look(_ANSWER_S), has_asked)
    _ring(found, parts.ring.look(), parts.doing, waits_for == exchange.RING)
    _state(found, parts.doing)
    threads = {agreement.THREAD, f"ft-tree-{AGREEMENT}"} if has_asked else set()
    if waits_for == exchange.RING or _waits_for_reduction():
        threads.add(driver.THREAD)
    return Outside(tuple(found.operations), found.counts, found.groups, frozenset(threads))


def _question(found: _Found, view: View, is_awaited: bool) -> None:
    """Add the leader's question for a quorum. Its number is that of the quorum to be formed."""
    last = view.last
    received = 0 if last is None else last.number
    if view.asked is None:
        found.meets(QUESTIONS, (), received)
        return
    if view.waits is not None:
        others: Iterable[int] = view.waits
    elif view.silent_s > _SILENT_S:
        others = (SERVER,)
    else:
        others = () if last is None else last.members
    number = received + 1 if view.following is None else view.following
    found.meets(QUESTIONS, others, number)
    about, age_s = f"step {view.asked.next_step + 1}", round(view.asked_s, 3)
    found.operations.append(Operation(QUESTIONS, QUORUM, number, awaited=is_awaited, age_s=age_s, about=about))


def _ring(found: _Found, ring: driver.State, doing: Doing, is_awaited: bool) -> None:
    """Add the ring's connecting or its last all-reduce. Their numbers count from the connecting on."""
    quorum = next((one for one in list(doing.quorums) if one.number == ring.number), None)
    if quorum is None or ring.members < 2:
        return
    joins, reduces = (f"{name}/{ring.number}/{found.rank}" for name in ("CONNECT", "RING"))
    found.meets(joins, quorum.members, 1)
    found.meets(reduces, quorum.members, ring.begun)
    age_s = round(ring.since_s, 3)
    if ring.connects:
        found.operations.append(Operation(joins, CONNECT, 1, awaited=is_awaited, age_s=age_s))
    elif ring.begun:
        waits = is_awaited and ring.is_busy
        done = not ring.is_busy
        found.operations.append(Operation(reduces, "all_reduce", ring.begun, done=done, awaited=waits, age_s=age_s))


def _state(found: _Found, doing: Doing) -> None:
    """Add the fetch of a state, on the rank that is behind and on those that hold their update back for it."""
    quorum = doing.quorums[-1] if doing.quorums else None
    if quorum is None:
        return
    group = f"STATE/{quorum.number}/{found.rank}"
    if found.replica in quorum.behind:
        found.meets(group, (), 0)
        found.counts |= {channel(group, SEND, replica): 1 for replica in quorum.healthy}
    if doing.waits_for == FETCHES:
        own = f"FETCH/{quorum.number}/{found.rank}/{found.replica}"
        found.meets(own, (), 1)
        found.operations.append(Operation(own, FETCH, 1))
    if doing.waits_for == SERVES:
        found.meets(group, (), 0)
        found.operations += [Operation(group, FETCH, 1, peer=replica) for replica in quorum.behind]


def _waits_for_reduction() -> bool:
    """Return whether the training thread waits for the ring's thread, which waits for a reduction in the replica."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    file, function = _REDUCTION
    return frame is not None and frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file)
