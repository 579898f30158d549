"""Messages between the leaders of replicas and the quorum server: reports and quorums.

A replica is a full copy of the model with its own world of ranks; its leader is the rank that talks to the server. A
quorum is the set of replicas that take part in a training step.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

from ft.base.errors import FtError

NO_STATE = (0, -1)
"""(next_step, lineage) of a replica that has neither loaded nor initialised any state."""


class BadMessage(FtError):
    """A message that is framed correctly but has impossible content."""


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
            next_step 0, when the replica has no state at all.
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
        """(next_step, lineage): the larger tuple is further in training, and equal tuples name the same state."""
        return (self.next_step, self.lineage)

    @classmethod
    def parse(cls, values: Any) -> "Report":
        """Build a report from JSON values.

        Raises:
            BadMessage: the values are no valid report.
        """
        given = _fields(cls, values)
        _check(
            _is_count(given["replica"]) and _is_count(given["life"]) and _is_count(given["next_step"]),
            "replica, life and next_step are counts",
            values,
        )
        lineage, step_s = given["lineage"], given.get("step_s")
        _check(_is_whole(lineage) and lineage >= -1, "lineage is -1 or more", values)
        _check(lineage >= 0 or given["next_step"] == 0, "lineage -1 goes with next_step 0", values)
        _check(step_s is None or (isinstance(step_s, int | float) and 0 <= step_s < 1e9), "step_s is seconds", values)
        given["suspects"] = _counts(given.get("suspects", ()), values)
        _check(isinstance(given.get("finished", False), bool) and _is_count(given.get("number", 0)), "fields", values)
        return cls(**given)


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
        """Healthy and behind replicas, ascending; this is their order in the gradient rings."""
        return tuple(sorted(self.healthy + self.behind))

    @classmethod
    def parse(cls, values: Any) -> "Quorum":
        """Build a quorum from JSON values.

        Raises:
            BadMessage: the values are no valid quorum.
        """
        given = _fields(cls, values)
        _check(_is_count(given["number"]) and _is_count(given["step"]), "number and step are counts", values)
        _check(_is_whole(given["lineage"]), "lineage is whole", values)
        given["healthy"], given["behind"] = (_counts(given[name], values) for name in ("healthy", "behind"))
        lives = given["lives"]
        try:
            given["lives"] = {int(replica): life for replica, life in lives.items()}
        except (AttributeError, ValueError) as error:
            raise BadMessage(f"lives is no mapping of replicas: {str(lives)[:100]!r}") from error
        _check(all(map(_is_count, given["lives"].values())), "lives are counts", values)
        quorum = cls(**given)
        _check(set(quorum.members) == quorum.lives.keys(), "every member has a life", values)
        return quorum


def _fields(kind: type, values: Any) -> dict[str, Any]:
    known, needed = _NAMES[kind]
    _check(isinstance(values, dict) and needed <= values.keys() <= known, "fields", values)
    return dict(values)


def _counts(values: Any, whole: Any) -> tuple[int, ...]:
    _check(isinstance(values, list | tuple) and all(map(_is_count, values)), "replicas are counts", whole)
    return tuple(sorted(set(values)))


def _is_whole(value: Any) -> bool:
    return type(value) is int  # isinstance would accept bool, too


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _check(is_right: bool, rule: str, values: Any) -> None:
    if not is_right:
        raise BadMessage(f"no such message is allowed ({rule}): {str(values)[:200]}")


_MOST = 1 << 62
_NAMES = {
    kind: (
        frozenset(f.name for f in fields(kind)),
        frozenset(f.name for f in fields(kind) if f.default is MISSING),
    )
    for kind in (Report, Quorum)
}
"""For each message type: the names of all fields, and the names of those that are required."""
