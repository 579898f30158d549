"""Compute and format the current state of a run for ``ft status``, from what its processes wrote last.

The run's files look the same after a SIGKILL of the process that directs it; whether one is left is seen by its lease,
a file that it renews periodically.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.faults.verdict import NODE_LOST
from ft.observe.report import ranks
from ft.observe.report.lineage import Step
from ft.observe.report.record import NOTHING, Record, load
from ft.platform import election, processes
from ft.record import run as records
from ft.record.recoveries import UNDER_WAY, Recovery
from ft.record.run import NOT_ENDED, Run, is_planned_end
from ft.show.text import seconds, shortened, table

_MOST_FINDINGS, _MOST_HOSTS = 5, 4

STALE_S = 10.0
"""Age in seconds from which a status counts as stale. A live control plane writes its state at every change, and each
heartbeat of an agent is a change. With replicas the age is that of the last commit; there it is at least three steps.
"""

_RECENT = 1 << 18
"""Bytes read from the end of each replica's commit log for the status, which suffices for some hundreds of steps."""

GONE_S = 60.0
"""Seconds without any write after which a control plane on another host counts as lost. A successor on another node may
need up to half of that time to import its modules.
"""

_SUCCESSION_S, _RENEWAL_S = 5.0, 0.5
"""Seconds to watch the lease for a renewal. The first value suffices for another node to take the lease over. The
second suffices for one renewal, and is used in runs of a single node, where no other node can take the lease over.
"""

_NODES = 2
"""Assumed number of nodes with launchers of replicas (the processes that ``ft run`` starts). No file records the
number. With 2, another node has the time to take over the lease of the quorum server's host.
"""


@dataclass(frozen=True)
class Member:
    """The state of one worker.

    Attributes:
        rank: its logical rank, None for a standby.
        host: host name of its node, "" where unknown.
        state: what the worker is doing, as text.
        step: the last step that it reported, None where unknown.
        lag: steps between the committed step and its newest snapshot, None where unknown.
    """

    rank: int | None
    worker: str
    node: str
    state: str
    step: int | None
    lag: int | None
    host: str = ""


@dataclass(frozen=True)
class Lost:
    """A node that the run has lost.

    Attributes:
        host: its host name, "" where unknown.
        lost_s_ago: seconds since it was lost, None where unknown.
        back_as: name under which an agent of the same node has joined again, "" if none has.
    """

    node: str
    host: str
    reason: str
    lost_s_ago: float | None = None
    back_as: str = ""


@dataclass(frozen=True)
class ReplicaMember:
    """The state of one replica.

    Attributes:
        state: what the replica is doing, such as "online" or "catching up".
        step: number of the last step that it committed, or None.
        quorum: number of the quorum in which it committed that step, or None.
        position: its position in its stream of data samples, or None.
        age: seconds since it last committed a step, None before its first commit.
    """

    replica: int
    state: str
    step: int | None
    quorum: int | None
    position: int | None
    age: float | None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workers:
    """What the control plane of a run with one replica tells of its workers.

    Attributes:
        lag: steps between the committed step and the newest snapshot that all peers hold, None where there is none.
        last: the most recent recovery, or None.
        protected: whether a worker has ever joined the run under protection; None where no file says so.
        hot_swap: whether the run uses hot-swap: peers hold copies of the snapshots, and standbys take over.
        lacking: sentences about what is missing from the run's files.
        limits: the timeouts of the run that are not the defaults, in seconds by name.
        slow: sentences about the ranks that are persistently slower than others with the same work.
        health: what nodes have found about themselves, as sentences, the oldest first.
        hosts: node -> host name, for all nodes that have joined.
        lost: the nodes that were lost, in the order of their losses.
    """

    epoch: int | None
    lag: int | None
    restarts: int | None
    members: list[Member]
    last: Recovery | None
    recovered: int
    protected: bool | None
    hot_swap: bool
    nodes: int
    lacking: list[str]
    limits: dict[str, float]
    slow: list[str]
    health: list[str]
    hosts: dict[str, str]
    lost: list[Lost]


@dataclass(frozen=True)
class Quorum:
    """What the commit logs of a run of FT-HSDP tell of its replicas.

    Attributes:
        quorum: number of the last quorum that committed, or None.
        healthy: the replicas that contributed in that quorum.
        behind: the replicas that fetched the state in that quorum.
        step_s: duration of a normal step in seconds, or None.
    """

    quorum: int | None
    healthy: tuple[int, ...]
    behind: tuple[int, ...]
    step_s: float | None
    members: list[ReplicaMember]


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment.

    Attributes:
        phase: what the run is doing, or the final state of a run that has ended.
        ended: whether the run has ended: with replicas, whether all of them have.
        step: number of the last committed step, or None.
        age: seconds since the state was written or, with replicas, since the last commit; None where there is none.
        gone: why no live process directs the run any more, "" while one does, or may do so.
        saves: the last save of a checkpoint, and its age; "" before the first.
    """

    phase: str
    ended: bool
    step: int | None
    age: float | None
    gone: str = ""
    saves: str = ""
    workers: Workers | None = None
    quorum: Quorum | None = None

    @property
    def stale(self) -> bool:
        """Return whether the run has not ended, but has written nothing for too long."""
        step_s = self.quorum.step_s if self.quorum is not None else None
        limit = max(STALE_S, 3 * (step_s or 0.0))
        return not self.ended and not self.gone and self.age is not None and self.age > limit


def now(folder: str | Path) -> tuple[Status, str]:
    """Return the status of a run at this moment, and its folder.

    Raises:
        UserError: there is no such run.
    """
    record = load(folder, _RECENT)
    found = status(record, time.time())
    if not found.ended and (why := _gone(record, found)):
        record = load(folder, _RECENT)  # read again: the run may have ended while its lease was watched for renewals
        found = status(record, time.time(), why)
    return found, str(record.folder)


def status(record: Record, now: float, gone: str = "") -> Status:
    """Return the status of a run.

    Args:
        now: wall time in seconds since 1970.
        gone: why no live process directs the run any more; ignored if the run has ended.
    """
    gone = "" if record.has_ended else gone
    saves = last_save([event for _, event in record.history], now)
    if record.has_quorum:
        last = record.steps[-1] if record.steps else None
        return Status(
            phase=record.state if record.has_ended else "training" if last else "starting",
            ended=record.has_ended,
            step=last.number if last else None,
            age=max(0.0, now - last.when) if last else None,
            gone=gone,
            saves=saves,
            quorum=_quorum(record, last, now),
        )
    only = record.only
    updated = records.number(only.status, "updated") or (only.events[-1].wall if only.events else None)
    step = records.last_step(only)
    if only.status.get("protected") is False and only.metrics:  # the control plane hears nothing of such a run's steps
        step = max(step or 0, only.metrics[-1]["step"])
    return Status(
        phase=only.state if record.has_ended else str(only.status.get("phase") or "unknown"),
        ended=record.has_ended,
        step=step,
        age=None if updated is None else max(0.0, now - updated),
        gone=gone,
        saves=saves,
        workers=_workers(only, only.recoveries, record.has_ended, step, now),
    )


def _workers(run: Run, found: Sequence[Recovery], ended: bool, step: int | None, now: float) -> Workers:
    """Return what ``status.json`` tells of the workers; what it lacks follows from the events."""
    stored, hosts = run.status, events.hosts(run.events)
    epoch = next((event.epoch for event in reversed(run.events) if event.epoch is not None), None)
    protected = stored.get("protected")
    members = [replace(one, host=hosts.get(one.node, "")) for one in _members(stored)]
    return Workers(
        epoch=None if protected is False else _whole(stored.get("epoch"), epoch),
        lag=None if ended else _whole(stored.get("lag")),
        restarts=_whole(stored.get("restarts")),
        members=_at_the_end(members, run.state, step) if ended else members,
        last=found[-1] if found else None,
        recovered=sum(r.is_over for r in found),
        protected=protected if isinstance(protected, bool) else None,
        hot_swap=stored.get("hot_swap") is not False,
        nodes=len(stored["nodes"]) if isinstance(stored.get("nodes"), dict) else 1,
        lacking=records.lacking(run),
        limits=stored["limits"] if isinstance(stored.get("limits"), dict) else {},
        slow=ranks.sentences(stored.get("stragglers")),
        health=health(run),
        hosts=hosts,
        lost=lost_nodes(run, now),
    )


def _quorum(record: Record, last: Step | None, now: float) -> Quorum:
    states = {lane.replica: lane.state for lane in record.lanes}
    return Quorum(
        quorum=last.commit.quorum if last else None,
        healthy=last.commit.healthy if last else (),
        behind=last.commit.behind if last else (),
        step_s=record.pace.normal[-1] if last else None,
        members=[_replica(record, number, states, last, now) for number in range(record.count)],
    )


def gone(folder: Path, age: float | None, nodes: int, *, is_steady: bool = False) -> str:
    """Return why the run has no control plane any more, or "" while it has, or may have, one.

    Args:
        folder: the folder that holds the lease.
        age: seconds since the run last wrote anything, or None if it never did.
        nodes: number of nodes of the run.
        is_steady: whether a lease holder renews the lease without a pause from the moment it takes the lease over.
    """
    standing = election.read(folder)
    if standing is None:
        return ""
    lives = processes.lives(standing.launcher) if standing.launcher else None
    if lives or election.is_kept(folder, _RENEWAL_S if nodes == 1 and lives is False else _SUCCESSION_S):
        return ""
    if lives is False:
        return (
            "the process ft run on this host has disappeared without reporting the end of the run; it may have been "
            "killed"
        )
    if is_steady or (age is not None and age > GONE_S):
        return "no process renews the lease of the control plane: ft run has been killed, or its host is lost"
    return ""


def _gone(record: Record, found: Status) -> str:
    """Return why no live process directs the run any more, "" while one does, or may do so.

    Of replicas, the launcher that hosts the quorum server holds a lease.
    """
    if found.workers is None:
        return gone(record.folder / election.LAUNCHERS, None, _NODES, is_steady=True)
    return gone(record.folder, found.age, found.workers.nodes)


def lost_nodes(run: Run, now: float) -> list[Lost]:
    """Return the nodes that the run has lost, in the order of their losses. ``now``: seconds since 1970."""
    hosts, found = events.hosts(run.events), {}
    for event in run.events:
        node = event.node or ""
        if event.name == events.FAULT_DETECTED and event.detail.get("signal") == NODE_LOST and node not in found:
            found[node] = Lost(node, hosts.get(node, ""), _why_lost(event), max(0.0, now - event.wall))
        elif event.name == events.AGENT_JOINED:  # an agent that joins again is called n1-2
            same = [lost for lost in found.values() if lost.node.partition("-")[0] == node.partition("-")[0]]
            found |= {lost.node: replace(lost, back_as=node) for lost in same if not lost.back_as}
    nodes = run.status.get("nodes")
    if run.state == NOT_ENDED and isinstance(nodes, dict):  # a node without workers has no event of its loss
        gone = {name: str(why) for name, why in nodes.items() if why != "up" and not str(why).startswith("suspect:")}
        found |= {name: Lost(name, hosts.get(name, ""), why) for name, why in gone.items() if name not in found}
    return list(found.values())


def _why_lost(event: Event) -> str:
    """Return the reason without the words "node n1 (gpu0137) is lost", with which it begins."""
    return str(event.detail.get("reason", "")).partition(" is lost: ")[2]


def lost_sentence(lost: Lost, hosts: Mapping[str, str]) -> str:
    """Return text such as "n1 (gpu0137), 2 min ago: nothing was heard of its agent for 3.7 s"."""
    when = "" if lost.lost_s_ago is None else f", {seconds(lost.lost_s_ago)} ago"
    why = f": {lost.reason}" if lost.reason else ""
    back = f"; joined again as {lost.back_as}" if lost.back_as else ""
    return f"{events.named(lost.node, hosts)}{when}{why}{back}"


def last_save(history: Sequence[Event], now: float, when: str = "ago") -> str:
    """Return a sentence about the last save of a checkpoint, "" before the first.

    Args:
        now: the time in seconds since 1970 from which the age of a save counts.
        when: words after the age.
    """

    def age(event: Event) -> str:
        return f"{seconds(max(0.0, now - event.wall))} {when}"

    saved = next((event for event in reversed(history) if event.name == events.SAVED), None)
    ended = next((event for event in reversed(history) if event.name in (events.SAVED, events.SAVE_FAILED)), None)
    good = "none was saved" if saved is None else f"step {saved.step}, {age(saved)}"
    if ended is saved:
        return "" if saved is None else good
    return f"THE LAST SAVE FAILED (step {ended.step}, {age(ended)}): {ended.detail.get('reason')}; last saved: {good}"


def health(run: Run) -> list[str]:
    """Return what nodes have found about themselves, as sentences, the oldest first."""
    found, hosts = [], events.hosts(run.events)
    for event in run.events:
        if event.name == events.HEALTH_FOUND:
            said = event.detail
            device = f"{events.named(event.node, hosts)} {said.get('device') or ''}".rstrip()
            found.append(f"{device}: {said.get('action', '?')}: {shortened(str(said.get('reason', '')), 160)}")
    return found


def saves(history: Sequence[Event]) -> list[str]:
    """Return a sentence about the last save of a checkpoint, for a report; none before the first save."""
    said = last_save(history, history[-1].wall, "before the last event") if history else ""
    return [said] if said else []


def as_text(found: Status, folder: str) -> str:
    """Return the status as a few lines and a table of the workers or of the replicas."""
    facts = [("run", folder), ("state", _state(found)), *([("", found.gone)] if found.gone else [])]
    facts.append(("step", _shown(found.step)))
    facts += _quorum_facts(found.quorum) if found.quorum is not None else []
    facts += _control_facts(found, found.workers) if found.workers is not None else []
    facts += [("saved", found.saves)] if found.saves else []
    facts += _node_facts(found.workers) if found.workers is not None else []
    lines = [f"{name:<10} {value}" for name, value in facts]
    if found.quorum is not None:
        lines += ["", _replica_table(found.quorum)]
    elif found.workers is not None and found.workers.members:
        lines += ["", _member_table(found.workers)]
    return "\n".join(lines)


def _state(found: Status) -> str:
    state = f"gone (it was {found.phase})" if found.gone else found.phase
    if found.age is None or (found.quorum is not None and found.ended):
        return state
    when = "last step" if found.quorum is not None else "ended" if found.ended else "updated"
    return f"{state}, {when} {seconds(found.age)} ago" + (" (stale?)" if found.stale else "")


def _quorum_facts(found: Quorum) -> list[tuple[str, str]]:
    members = [", ".join(map(str, found.healthy)) or "-"]
    members += [f"catching up: {', '.join(map(str, found.behind))}"] if found.behind else []
    which = f"{_shown(found.quorum)} of replicas {'; '.join(members)}"
    return [("each", seconds(found.step_s)), ("quorum", which)]


def _control_facts(found: Status, workers: Workers) -> list[tuple[str, str]]:
    facts = [
        ("epoch", _shown(workers.epoch)),
        ("snapshots", _snapshots(workers, found.ended)),
        ("restarts", _shown(workers.restarts)),
        ("recovered", str(workers.recovered)),
        ("last", _last(workers.last)),
    ]
    return facts + [("lost", lost_sentence(lost, workers.hosts)) for lost in workers.lost]


def _node_facts(workers: Workers) -> list[tuple[str, str]]:
    facts = []
    if workers.limits:
        facts.append(("limits", ", ".join(f"{name} = {value:g} s" for name, value in workers.limits.items())))
    facts += [("straggler", text) for text in workers.slow]
    facts += [("health", text) for text in workers.health[-_MOST_FINDINGS:]]
    if len(workers.health) > _MOST_FINDINGS:
        facts.append(("", f"and {len(workers.health) - _MOST_FINDINGS} earlier, which ft report shows"))
    return facts + [("records", text) for text in workers.lacking]


def _member_table(workers: Workers) -> str:
    rows = [
        (
            "standby" if m.rank is None else str(m.rank),
            m.worker,
            events.named(m.node or "-", workers.hosts),
            m.state or "-",
            _shown(m.step),
            _shown(m.lag),
        )
        for m in workers.members
    ]
    return table(("rank", "worker", "node", "state", "step", "lag"), rows, right=(4, 5))


def _replica_table(found: Quorum) -> str:
    rows = [
        (str(m.replica), m.state, _shown(m.step), _shown(m.quorum), _shown(m.position), seconds(m.age))
        for m in found.members
    ]
    head = ("replica", "state", "step", "quorum", "samples taken", "last step ago")
    if len({host for member in found.members for host in member.hosts}) > 1:
        head = (*head, "hosts")
        rows = [(*row, _few(member.hosts)) for row, member in zip(rows, found.members, strict=True)]
    return table(head, rows, right=(2, 3, 4, 5))


def _few(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return ", ".join(hosts[:_MOST_HOSTS]) + more or "-"


def as_values(found: Status) -> dict[str, Any]:
    """Return the status as JSON values."""
    values = {
        "phase": found.phase,
        "step": found.step,
        "updated_s_ago": found.age,
        "stale": found.stale,
        "ended": found.ended,
        "gone": found.gone,
        "saves": found.saves,
    }
    if found.quorum is not None:
        own = found.quorum
        values |= {"quorum": own.quorum, "healthy": list(own.healthy), "behind": list(own.behind)}
        values |= {"step_s": own.step_s, "replicas": [vars(member) for member in own.members]}
    if found.workers is not None:
        workers = found.workers
        values |= {name: getattr(workers, name) for name in _SAME_NAMES}
        values |= {"members": [vars(member) for member in workers.members], "stragglers": workers.slow}
        values["lost"] = [vars(one) for one in workers.lost]
        values["last_recovery"] = _recovery_values(workers.last) if workers.last is not None else None
    return values


_SAME_NAMES = ("epoch", "lag", "restarts", "protected", "recovered", "lacking", "limits", "health", "hosts")
"""Fields of :class:`Workers` that are JSON values with the same names."""


def _recovery_values(last: Recovery) -> dict[str, Any]:
    gravest = last.faults[0] if last.faults else None
    return {
        "number": last.number,
        "outcome": last.outcome,
        "reason": last.reason,
        "worker": gravest.worker if gravest else None,
        "node": gravest.node if gravest else None,
        "host": last.hosts.get(gravest.node or "", "") if gravest else "",
        "total_s": last.total,
        "phases_s": last.phases,
        "step": last.step,
    }


def _members(stored: dict[str, Any]) -> list[Member]:
    seats, standbys = stored.get("seats"), stored.get("standbys")
    found = []
    if isinstance(seats, dict):
        ordered = sorted(seats.items(), key=lambda item: _whole(item[0], 0))
        found += [_member(_whole(rank), seat, "training") for rank, seat in ordered]
    if isinstance(standbys, list):
        found += [_member(None, standby, "standby") for standby in standbys]
    return found


def _member(rank: int | None, values: Any, state: str) -> Member:
    """Build a member from what the control plane has written of a worker."""
    values = values if isinstance(values, dict) else {}
    beat = values.get("beat")
    values = {**values, **beat} if isinstance(beat, dict) else values
    worker = str(values.get("worker", "-"))
    node = str(values.get("node") or worker.rpartition(".")[0])
    doing = str(values.get("doing") or state)
    where = str(values.get("where") or "") if doing != "compute" else ""
    return Member(
        rank,
        worker,
        node,
        f"{doing}: {where}" if where else doing,
        _whole(values.get("step")),
        _whole(values.get("lag")),
    )


def _at_the_end(members: list[Member], state: str, step: int | None) -> list[Member]:
    """Return the members as they were at the end of the run.

    The last heartbeats were sent before the end, so their steps may be too small. In a run that has finished, every
    rank has committed the last step.
    """
    if is_planned_end(state):
        return [replace(m, state="finished", step=None if m.rank is None else step, lag=None) for m in members]
    return [replace(m, state=f"ended (last seen: {m.state})", lag=None) for m in members]


def _snapshots(found: Workers, ended: bool) -> str:
    if found.protected is False:
        when = "ever joined" if ended else "joined"
        return f"none: no worker has {when} the run, and nothing {'protected' if ended else 'protects'} it"
    if not found.hot_swap:
        return "none: the other replicas hold the state"
    if found.lag is None:
        return "-"
    return f"{found.lag} behind the committed step" if found.lag else "all peers hold the committed step"


def _last(recovery: Recovery | None) -> str:
    if recovery is None:
        return "no recovery"
    reason = f": {recovery.headline}" if recovery.headline else ""
    took = "" if recovery.outcome == UNDER_WAY else f" in {seconds(recovery.total)}"
    return f"recovery {recovery.number}, {recovery.outcome}{took}{reason}"


def _replica(record: Record, number: int, states: dict[int, str], last: Step | None, now: float) -> ReplicaMember:
    own = record.replicas.get(number)
    latest = max(own.commits, key=lambda commit: (commit.quorum, commit.step), default=None) if own else None
    over = own.state if own is not None and own.state not in (NOT_ENDED, NOTHING) else ""
    return ReplicaMember(
        replica=number,
        state=over or states.get(number, "no folder" if own is None else "starting"),
        step=latest.step if latest else None,
        quorum=latest.quorum if latest else None,
        position=last.commit.positions.get(number, 0) if last else None,
        age=max(0.0, now - latest.wall) if latest else None,
        hosts=_hosts(own.events) if own is not None else (),
    )


def _hosts(history: Sequence[Event]) -> tuple[str, ...]:
    """Return the host names of the nodes of a replica; an agent that joins again is called n1-2."""
    latest = {node.partition("-")[0]: host for node, host in events.hosts(history).items()}
    return tuple(dict.fromkeys(latest.values()))


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _whole(value: Any, otherwise: int | None = None) -> int | None:
    try:
        return otherwise if value is None else int(value)
    except (ValueError, TypeError):
        return otherwise
