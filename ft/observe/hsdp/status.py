"""Compute and format the current state of an FT-HSDP run for ``ft status``.

A replica is a full copy of the model with its own workers. A quorum is the set of replicas that take part in an attempt
at a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ft.base import events
from ft.observe.hsdp.lanes import lanes
from ft.observe.hsdp.lineage import Step, lineage
from ft.observe.hsdp.record import NOTHING, Record, ReplicaRecord
from ft.observe.hsdp.stalls import find
from ft.observe.report.status import STALE_S, last_save, shown, state_facts
from ft.record.run import is_planned_end
from ft.show.text import seconds, table

_MOST_HOSTS = 4


@dataclass(frozen=True)
class Member:
    """The state of one replica.

    Attributes:
        replica: number of the replica.
        state: what the replica is doing, such as "online" or "catching up".
        step: number of the last step that it committed, or None.
        quorum: number of the quorum in which it committed that step, or None.
        position: its position in its stream of data samples, or None.
        age: seconds since it last committed a step, None before its first commit.
        hosts: host names of its nodes.
    """

    replica: int
    state: str
    step: int | None
    quorum: int | None
    position: int | None
    age: float | None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment.

    Attributes:
        phase: "starting", "training", or the final state.
        ended: whether all replicas have ended.
        step: number of the last committed step, or None.
        quorum: number of the last quorum that committed, or None.
        healthy: the replicas that contributed in that quorum.
        behind: the replicas that fetched the state in that quorum.
        age: seconds since the last commit, or None.
        step_s: duration of a normal step in seconds, or None.
        members: the replicas.
        gone: why the run has no live launcher any more, "" while it has, or may have, one.
        saves: the last save of a checkpoint by any replica, and its age; "" before the first.
    """

    phase: str
    ended: bool
    step: int | None
    quorum: int | None
    healthy: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    age: float | None = None
    step_s: float | None = None
    members: list[Member] = field(default_factory=list)
    gone: str = ""
    saves: str = ""

    @property
    def stale(self) -> bool:
        """Return whether the run has not ended, but has committed nothing for much longer than a step takes."""
        return (
            not self.ended
            and not self.gone
            and self.age is not None
            and self.age > max(STALE_S, 3 * (self.step_s or 0.0))
        )


def status(record: Record, now: float, gone: str = "") -> Status:
    """Return the status of the run at the wall time ``now``; ``gone`` as in :class:`Status`."""
    steps = lineage({number: one.commits for number, one in record.replicas.items()}).steps
    pace, _ = find(steps, record.events)
    last = steps[-1] if steps else None
    states = {lane.replica: lane.state for lane in lanes(record, steps, pace.took)}
    ended = all(is_planned_end(one.state) or one.state.startswith("stopped") for one in record.replicas.values())
    return Status(
        phase=record.state if ended else "training" if steps else "starting",
        ended=ended,
        step=last.number if last else None,
        quorum=last.commit.quorum if last else None,
        healthy=last.commit.healthy if last else (),
        behind=last.commit.behind if last else (),
        age=max(0.0, now - last.when) if last else None,
        step_s=pace.normal[-1] if steps else None,
        members=[_member(record, number, states, last, now) for number in range(record.count)],
        gone="" if ended else gone,
        saves=last_save([event for _, event in record.history], now),
    )


def as_text(found: Status, folder: str) -> str:
    """Return the status as a few lines and a table of the replicas."""
    age = None if found.ended else found.age
    members = [", ".join(map(str, found.healthy)) or "-"]
    members += [f"catching up: {', '.join(map(str, found.behind))}"] if found.behind else []
    facts = [
        *state_facts(folder, found.phase, found.gone, age, "last step {} ago", found.stale),
        ("step", shown(found.step)),
        ("each", seconds(found.step_s)),
        ("quorum", f"{shown(found.quorum)} of replicas {'; '.join(members)}"),
    ]
    facts += [("saved", found.saves)] if found.saves else []
    rows = [
        (str(m.replica), m.state, shown(m.step), shown(m.quorum), shown(m.position), seconds(m.age))
        for m in found.members
    ]
    head = ("replica", "state", "step", "quorum", "samples taken", "last step ago")
    if len({host for member in found.members for host in member.hosts}) > 1:
        head = (*head, "hosts")
        rows = [(*row, _few(member.hosts)) for row, member in zip(rows, found.members, strict=True)]
    return "\n".join([*(f"{name:<10} {value}" for name, value in facts), "", table(head, rows, right=(2, 3, 4, 5))])


def as_values(found: Status) -> dict[str, Any]:
    """Return the status as JSON values."""
    return {
        "phase": found.phase,
        "ended": found.ended,
        "gone": found.gone,
        "step": found.step,
        "quorum": found.quorum,
        "healthy": list(found.healthy),
        "behind": list(found.behind),
        "updated_s_ago": found.age,
        "stale": found.stale,
        "step_s": found.step_s,
        "saves": found.saves,
        "replicas": [vars(member) for member in found.members],
    }


def _few(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return ", ".join(hosts[:_MOST_HOSTS]) + more or "-"


def _hosts(own: ReplicaRecord) -> tuple[str, ...]:
    """Return the host names of the nodes of a replica; an agent that joins again is called n1-2."""
    latest = {node.partition("-")[0]: host for node, host in events.hosts(own.events).items()}
    return tuple(dict.fromkeys(latest.values()))


def _member(record: Record, number: int, states: dict[int, str], last: Step | None, now: float) -> Member:
    own = record.replicas.get(number)
    latest = max(own.commits, key=lambda commit: (commit.quorum, commit.step), default=None) if own else None
    over = own.state if own is not None and own.state not in ("not ended", NOTHING) else ""
    return Member(
        replica=number,
        state=over or states.get(number, "no folder" if own is None else "starting"),
        step=latest.step if latest else None,
        quorum=latest.quorum if latest else None,
        position=last.commit.positions.get(number, 0) if last else None,
        age=max(0.0, now - latest.wall) if latest else None,
        hosts=_hosts(own) if own is not None else (),
    )
