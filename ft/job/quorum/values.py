"""Messages between the leaders of replicas and the quorum server: reports and quorums, and their form on the wire."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ft.base import bounded_json
from ft.base.errors import FtError, UserError
from ft.net.codec import BadMessage, is_count

NO_STATE = (0, -1)
"""(next_step, lineage) of a replica that has neither loaded nor initialised any state."""


_ESTIMATE, _ESTIMATES, _REPLICAS = 2**42, 2**20, 1024
"""The first is larger than every quorum number. An estimated state has the lineage of the exact one, less a multiple of
it: one of so many, which are told apart by the life and the number of the replica, below the last.
"""

EPOCHS = 10**6
"""Lives of a replica between two restarts of all its workers, if standbys replace lost ones: restart r begins with life
r * EPOCHS, and each replacement with the life that follows."""


def estimated(lineage: int, replica: int, life: int) -> int:
    """Return the lineage of a state of which a part was estimated (CheckFree) when ``life`` of ``replica`` began.

    It differs from the lineage of every other state of the same step, and every exact state of that step counts as
    further.
    """
    return committed_in(lineage) - (1 + (life * _REPLICAS + replica) % _ESTIMATES) * _ESTIMATE


def committed_in(lineage: int) -> int:
    """Return the number of the quorum in which the last step of a state was committed."""
    return lineage % _ESTIMATE


class NoQuorum(FtError):
    """The server refuses this replica: too few replicas for too long, or this life of the replica is over."""


@dataclass(frozen=True)
class Report:
    """Request of a replica's leader for the members of its next step.

    Attributes:
        replica: number of the replica.
        life: its life, which is one world of worker processes, numbered by its agent.
        next_step: number of committed steps in its state, hence the index (from 0) of its next step.
        lineage: number of the quorum in which its last step was committed; 0 before the first step; -1, together with
            next_step 0, when the replica has no state at all; less if a part of the state was estimated
            (:func:`estimated`).
        suspects: replicas of the last quorum that this replica could not reach in its gradient rings; contains this
            replica if the fault is its own.
        step_s: usual duration of its steps in seconds, None while unknown.
        finished: whether it has done the last step of the run.
        number: number of the last quorum that this life has received; filled in by the client.
    """

    replica: int
    life: int
    next_step: int
    lineage: int
    suspects: tuple[int, ...] = ()
    step_s: float | None = None
    finished: bool = False
    number: int = 0

    @property
    def state(self) -> tuple[int, int]:
        """Return (next_step, lineage): a larger tuple is further in training, equal tuples name the same state."""
        return (self.next_step, self.lineage)

    def __post_init__(self) -> None:
        counts = (self.replica, self.life, self.next_step, self.number, *self.suspects)
        _check(all(map(is_count, counts)), "replica, life, next_step, number and suspects are counts")
        _check((self.lineage == -1) <= (self.next_step == 0), "lineage -1 goes with next_step 0")
        _check(self.lineage >= -1 or self.next_step > 0, "an estimate goes with a step")
        _check(self.step_s is None or 0 <= self.step_s < 1e9, "step_s is seconds")


@dataclass(frozen=True)
class Quorum:
    """The members of a step; every member receives the same quorum.

    Attributes:
        number: number of the quorum, which increases over all servers of a run and is never used twice.
        step: index of the step to do, which is the next_step of the healthy members.
        lineage: lineage of the healthy members. (step, lineage) identifies the state that members behind have to fetch.
        healthy: replicas that train in the step, ascending.
        behind: replicas that fetch their state during the step and contribute zero gradients.
        lives: replica -> life, for every member.
        load: whether no member has a state. Then all load the last persistent checkpoint, or initialise, and report
            again.
        finished: whether the last step of the run is done, so that there is no step to do.
        reason: why the quorum has these members, in words.
    """

    number: int
    step: int
    lineage: int
    healthy: tuple[int, ...]
    behind: tuple[int, ...]
    lives: Mapping[int, int] = field(hash=False)
    load: bool = False
    finished: bool = False
    reason: str = ""

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Return the healthy replicas and those behind, ascending; this is their order in the gradient rings."""
        return tuple(sorted(self.healthy + self.behind))

    def __post_init__(self) -> None:
        counts = (self.number, self.step, *self.healthy, *self.behind, *self.lives, *self.lives.values())
        _check(all(map(is_count, counts)), "number, step, replicas and lives are counts")
        _check(set(self.members) == self.lives.keys(), "every member has a life")


def _check(is_right: bool, rule: str) -> None:
    if not is_right:
        raise ValueError(f"no such message is allowed ({rule})")


# --- on the wire ------------------------------------------------------------------------------------------------------

PURPOSE, FRAME = "ft-quorum-3", b"QUOR"
"""The protocol's name in the handshake, and the kind of its frames. The body of each is a packed message."""


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message, a JSON object with a "kind"."""
    return json.dumps(message, separators=(",", ":")).encode()


def unpack(data: bytes) -> dict[str, Any]:
    """Decode a message that was received.

    Raises:
        BadMessage: it is not a valid message.
    """
    try:
        message = bounded_json.loads(str(data, "utf-8"), non_finite=True)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no JSON: {data[:100]!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadMessage(f"a message without a kind: {data[:100]!r}")
    return message


def parse_where(where: str) -> tuple[str, int]:
    """Split "tcp://HOST:PORT" into (host, port).

    Raises:
        UserError: ``where`` does not have that form.
    """
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    if not where.startswith("tcp://") or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{where!r} is no address of a quorum server", "give tcp://HOST:PORT")
    return host, int(port)
