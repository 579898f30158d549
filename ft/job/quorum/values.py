"""What leaders and the quorum server tell each other."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

from ft.base.errors import FtError

NO_STATE = (0, -1)
"""(next_step, lineage) of a replica that has loaded nothing and initialised nothing yet."""


class BadMessage(FtError):
    """A message of the right framing whose content is impossible."""


class NoQuorum(FtError):
    """There will be no quorum for this replica: there are too few for too long, or a later life of it is here."""


@dataclass(frozen=True)
class Report:
    """A replica's leader asks who is in its next step.

    Attributes:
        replica, life: who asks; a life is one world of worker processes, numbered by its agent.
        next_step: committed steps of its state, so the index from 0 of the step to come.
        lineage: number of the quorum in which its last step was committed; 0 before the first one, -1 with next_step 0
            when it has no state at all.
        suspects: replicas of the last quorum that its rings could not reach; itself, if the trouble is its own.
        step_s: how long a step takes it, None before it knows. finished: it has done the last step of the run.
        number: the last quorum this life has heard of; the client fills it in.
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
        """What is compared: the larger one is the further one, equal ones are the same state."""
        return (self.next_step, self.lineage)

    @classmethod
    def parse(cls, values: Any) -> "Report":
        """From JSON values.

        Raises:
            BadMessage: they are no report.
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
    """Who is in a step; all members are given the same one.

    Attributes:
        number: grows from quorum to quorum, over all servers of a run; never given twice.
        step: the step to do, the next_step of the healthy ones. lineage: theirs; (step, lineage) names the state that
            those behind have to fetch.
        healthy: replicas that train, ascending. behind: those that fetch meanwhile and contribute zeros.
        lives: replica -> life, of the members. load: nobody has a state: all load the last persistent checkpoint, or
            initialise, and report again. finished: the last step of the run is done; there is none to do.
        reason: why these, why now.
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
        """Healthy and behind, ascending: the order of the rings."""
        return tuple(sorted(self.healthy + self.behind))

    @classmethod
    def parse(cls, values: Any) -> "Quorum":
        """From JSON values.

        Raises:
            BadMessage: they are no quorum.
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
    return type(value) is int  # and not bool, which is one to isinstance


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
"""All fields of each, and those that must be there."""
