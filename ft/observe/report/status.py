"""Compute and format the current state of a run for ``ft status``, from what its control plane wrote last.

The control plane is the process that directs recoveries. Each worker holds a logical rank (a position in the parallel
grid) or is a standby (a warm worker without a rank). An epoch is a version of the map from logical ranks to workers. A
snapshot is a copy of a rank's state in host memory; peers hold copies of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.faults.verdict import NODE_LOST
from ft.observe.report import slow_ranks
from ft.record import missing as records
from ft.record.recoveries import UNDER_WAY, Recovery, recoveries
from ft.record.run import Run, is_planned_end
from ft.show.text import seconds, shortened, table

_MOST_FINDINGS = 5
_AGO = {False: "updated", True: "ended"}

STALE_S = 10.0
"""Age in seconds from which a status counts as stale. A live control plane writes its state at every change, and each
heartbeat of an agent is a change.
"""


@dataclass(frozen=True)
class Member:
    """The state of one worker.

    Attributes:
        rank: its logical rank, None for a standby.
        worker: its name.
        node: name of its node.
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
        node: its name.
        host: its host name, "" where unknown.
        why: why it counts as lost.
        age: seconds since it was lost, None where unknown.
        back: name under which an agent of the same node has joined again, "" if none has.
    """

    node: str
    host: str
    why: str
    age: float | None = None
    back: str = ""


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment.

    Attributes:
        phase: phase of the control plane, or the final state of a run that has ended.
        epoch: the current epoch, or None.
        step: number of committed steps.
        lag: steps between the committed step and the newest snapshot that all peers hold, None where there is none.
        restarts: number of warm restarts, or None.
        age: seconds since the state was written, or None.
        ended: whether the run has ended.
        members: the workers and standbys.
        last: the most recent recovery, or None.
        recovered: number of recoveries that are over.
        protected: whether a worker has ever joined the run under protection; None where no file says so.
        hot_swap: whether the run uses hot-swap: peers hold copies of the snapshots, and standbys take over.
        gone: why the run has no live control plane any more, "" while it has, or may have, one.
        nodes: number of nodes of the run.
        lacking: sentences about what is missing from the run's files.
        limits: the timeouts of the run that are not the defaults, in seconds by name.
        slow: sentences about the ranks that are persistently slower than others with the same work.
        health: what nodes have found about themselves, as sentences, the oldest first.
        hosts: node -> host name, for all nodes that have joined.
        lost: the nodes that were lost, in the order of their losses.
        saves: the last save of a checkpoint, and its age; "" before the first.
    """

    phase: str
    epoch: int | None
    step: int | None
    lag: int | None
    restarts: int | None
    age: float | None
    ended: bool
    members: list[Member] = field(default_factory=list)
    last: Recovery | None = None
    recovered: int = 0
    protected: bool | None = None
    hot_swap: bool = True
    gone: str = ""
    nodes: int = 1
    lacking: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    hosts: dict[str, str] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)
    saves: str = ""

    @property
    def stale(self) -> bool:
        return not self.ended and not self.gone and self.age is not None and self.age > STALE_S


def status(run: Run, now: float, gone: str = "") -> Status:
    """Return the status of ``run`` at the wall time ``now``; without status.json it is derived from the events.

    Args:
        run: the run's folder as read.
        now: wall time in seconds since 1970.
        gone: why the run has no live control plane any more; ignored if the run has ended.
    """
    stored = run.status
    found = recoveries(run.events)
    ended = run.state != "not ended"
    updated = _number(stored.get("updated")) or (run.events[-1].wall if run.events else None)
    epoch = next((event.epoch for event in reversed(run.events) if event.epoch is not None), None)
    protected = stored.get("protected")
    step, hosts = records.last_step(run), events.hosts(run.events)
    members = [replace(one, host=hosts.get(one.node, "")) for one in _members(stored)]
    if protected is False and run.metrics:  # the control plane gets no reports of such a run's steps
        step = max(step or 0, run.metrics[-1]["step"])
    return Status(
        phase=run.state if ended else str(stored.get("phase") or "unknown"),
        epoch=None if protected is False else _whole(stored.get("epoch"), epoch),
        step=step,
        lag=None if ended else _whole(stored.get("lag")),
        restarts=_whole(stored.get("restarts")),
        age=None if updated is None else max(0.0, now - updated),
        ended=ended,
        members=_at_the_end(members, run.state, step) if ended else members,
        last=found[-1] if found else None,
        recovered=sum(r.is_over for r in found),
        protected=protected if isinstance(protected, bool) else None,
        hot_swap=stored.get("hot_swap") is not False,
        gone="" if ended else gone,
        nodes=len(stored["nodes"]) if isinstance(stored.get("nodes"), dict) else 1,
        lacking=records.lacking(run),
        limits=stored["limits"] if isinstance(stored.get("limits"), dict) else {},
        slow=slow_ranks.sentences(stored.get("stragglers")),
        health=health(run),
        hosts=hosts,
        lost=lost_nodes(run, now),
        saves=last_save(run.events, now),
    )


def lost_nodes(run: Run, now: float) -> list[Lost]:
    """Return the nodes that the run has lost, in the order of their losses. ``now``: seconds since 1970."""
    hosts, found = events.hosts(run.events), {}
    for event in run.events:
        node = event.node or ""
        if event.name == events.FAULT_DETECTED and event.detail.get("signal") == NODE_LOST and node not in found:
            found[node] = Lost(node, hosts.get(node, ""), _why_lost(event), max(0.0, now - event.wall))
        elif event.name == events.AGENT_JOINED:  # an agent that joins again is called n1-2
            same = [lost for lost in found.values() if lost.node.partition("-")[0] == node.partition("-")[0]]
            found |= {lost.node: replace(lost, back=node) for lost in same if not lost.back}
    nodes = run.status.get("nodes")
    if run.state == "not ended" and isinstance(nodes, dict):  # a node without workers has no event of its loss
        gone = {name: str(why) for name, why in nodes.items() if why != "up" and not str(why).startswith("suspect:")}
        found |= {name: Lost(name, hosts.get(name, ""), why) for name, why in gone.items() if name not in found}
    return list(found.values())


def _why_lost(event: Event) -> str:
    """Return the reason without the words "node n1 (gpu0137) is lost", with which it begins."""
    return str(event.detail.get("reason", "")).partition(" is lost: ")[2]


def lost_sentence(lost: Lost, hosts: Mapping[str, str]) -> str:
    """Return text such as "n1 (gpu0137), 2 min ago: nothing was heard of its agent for 3.7 s"."""
    when = "" if lost.age is None else f", {seconds(lost.age)} ago"
    why = f": {lost.why}" if lost.why else ""
    back = f"; joined again as {lost.back}" if lost.back else ""
    return f"{events.named(lost.node, hosts)}{when}{why}{back}"


def last_save(history: Sequence[Event], now: float, when: str = "ago") -> str:
    """Return a sentence about the last save of a checkpoint, "" before the first.

    Args:
        history: events, in order of time.
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
    """Return the status as a few lines and a table of the members."""
    facts = [
        *state_facts(folder, found.phase, found.gone, found.age, f"{_AGO[found.ended]} {{}} ago", found.stale),
        ("step", shown(found.step)),
        ("epoch", shown(found.epoch)),
        ("snapshots", _snapshots(found)),
        ("restarts", shown(found.restarts)),
        ("recovered", str(found.recovered)),
        ("last", _last(found.last)),
    ]
    facts += [("lost", lost_sentence(lost, found.hosts)) for lost in found.lost]
    facts += [("saved", found.saves)] if found.saves else []
    if found.limits:
        facts.append(("limits", ", ".join(f"{name} = {value:g} s" for name, value in found.limits.items())))
    facts += [("straggler", text) for text in found.slow]
    facts += [("health", text) for text in found.health[-_MOST_FINDINGS:]]
    if len(found.health) > _MOST_FINDINGS:
        facts.append(("", f"and {len(found.health) - _MOST_FINDINGS} earlier, which ft report shows"))
    facts += [("records", text) for text in found.lacking]
    lines = [f"{name:<10} {value}" for name, value in facts]
    if found.members:
        rows = [
            (_rank(m), m.worker, events.named(m.node or "-", found.hosts), m.state or "-", shown(m.step), shown(m.lag))
            for m in found.members
        ]
        lines += ["", table(("rank", "worker", "node", "state", "step", "lag"), rows, right=(4, 5))]
    return "\n".join(lines)


def as_values(found: Status) -> dict[str, Any]:
    """Return the status as JSON values."""
    last = found.last
    return {
        "phase": found.phase,
        "epoch": found.epoch,
        "step": found.step,
        "lag": found.lag,
        "restarts": found.restarts,
        "updated_s_ago": found.age,
        "stale": found.stale,
        "ended": found.ended,
        "gone": found.gone,
        "protected": found.protected,
        "members": [vars(member) for member in found.members],
        "recovered": found.recovered,
        "lacking": found.lacking,
        "limits": found.limits,
        "stragglers": found.slow,
        "health": found.health,
        "hosts": found.hosts,
        "lost": [
            {"node": one.node, "host": one.host, "reason": one.why, "lost_s_ago": one.age, "back_as": one.back}
            for one in found.lost
        ],
        "saves": found.saves,
        "last_recovery": None
        if last is None
        else {
            "number": last.number,
            "outcome": last.outcome,
            "reason": last.reason,
            "worker": last.faults[0].worker if last.faults else None,
            "node": last.faults[0].node if last.faults else None,
            "host": last.hosts.get(last.faults[0].node or "", "") if last.faults else "",
            "total_s": last.total,
            "phases_s": last.phases,
            "step": last.step,
        },
    }


def _members(stored: dict[str, Any]) -> list[Member]:
    seats, standbys = stored.get("seats"), stored.get("standbys")
    found = []
    if isinstance(seats, dict):
        ordered = sorted(seats.items(), key=lambda item: _whole(item[0], 0))
        found += [_member(_whole(rank), seat, "training") for rank, seat in ordered]
    if isinstance(standbys, dict):
        standbys = [
            {"worker": name, **(values if isinstance(values, dict) else {})} for name, values in standbys.items()
        ]
    if isinstance(standbys, list):
        found += [_member(None, standby, "standby") for standby in standbys]
    return found


def _member(rank: int | None, values: Any, state: str) -> Member:
    """Build a member from a worker's name, or from a mapping that contains the name."""
    values = values if isinstance(values, dict) else {"worker": values}
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


def _rank(member: Member) -> str:
    return "standby" if member.rank is None else str(member.rank)


def _at_the_end(members: list[Member], state: str, step: int | None) -> list[Member]:
    """Return the members as they were at the end of the run.

    The last heartbeats were sent before the end, so their steps may be too small. In a run that has finished, every
    rank has committed the last step.
    """
    if is_planned_end(state):
        return [replace(m, state="finished", step=None if m.rank is None else step, lag=None) for m in members]
    return [replace(m, state=f"ended (last seen: {m.state})", lag=None) for m in members]


def _snapshots(found: Status) -> str:
    if found.protected is False:
        when = "ever joined" if found.ended else "joined"
        return f"none: no worker has {when} the run, and nothing {'protected' if found.ended else 'protects'} it"
    if not found.hot_swap:
        return "none: the other replicas hold the state"
    return "-" if found.lag is None else _lag(found.lag)


def _lag(lag: int) -> str:
    return "all peers hold the committed step" if lag == 0 else f"{lag} behind the committed step"


def _last(recovery: Recovery | None) -> str:
    if recovery is None:
        return "no recovery"
    reason = f": {recovery.headline}" if recovery.headline else ""
    took = "" if recovery.outcome == UNDER_WAY else f" in {seconds(recovery.total)}"
    return f"recovery {recovery.number}, {recovery.outcome}{took}{reason}"


def state_facts(folder: str, phase: str, gone: str, age: float | None, when: str, stale: bool) -> list[tuple[str, str]]:
    """Return the first lines of a status, as pairs of a name and a value.

    They are the run's folder, its state, and the reason why no live process directs it, if that is so.

    Args:
        folder: the run's folder.
        phase: phase or final state of the run.
        gone: why the run has no live process that directs it, "" while it has, or may have, one.
        age: seconds since the run has written anything; None: the state is shown without its age.
        when: the words for the age, with {} for the duration.
        stale: whether the age is suspiciously large.
    """
    words = [f"gone (it was {phase})" if gone else phase]
    if age is not None:
        words.append(when.format(seconds(age)) + (" (stale?)" if stale else ""))
    return [("run", folder), ("state", ", ".join(words)), *([("", gone)] if gone else [])]


def shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Any, otherwise: int | None = None) -> int | None:
    try:
        return otherwise if value is None else int(value)
    except (ValueError, TypeError):
        return otherwise
