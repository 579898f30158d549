"""The present state of a run for ``ft status``, from what its processes wrote last: as JSON values, and as text.

The run's files look the same after a SIGKILL of the process that directs it; whether one is left is seen by its lease,
a file that it renews periodically.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ft.base import events
from ft.base.events import Event
from ft.faults.verdict import NODE_LOST
from ft.observe.report.lineage import Step
from ft.observe.report.record import NOTHING, Record, ReplicaRecord, load
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


Values = dict[str, Any]
"""JSON values by name."""


def now(folder: str | Path) -> tuple[Values, str]:
    """Return the status of a run at this moment, and its folder.

    Raises:
        UserError: there is no such run.
    """
    record = load(folder, _RECENT)
    found = status(record, time.time())
    if not found["ended"] and (why := _gone(record, found)):
        record = load(folder, _RECENT)  # read again: the run may have ended while its lease was watched for renewals
        found = status(record, time.time(), why)
    return found, str(record.folder)


def status(record: Record, now: float, gone: str = "") -> Values:
    """Return the status of a run, as ``ft status --json`` prints it.

    Args:
        now: wall time in seconds since 1970.
        gone: why no live process directs the run any more; ignored if the run has ended.

    Returns:
        ``phase``: what the run is doing, or the final state of a run that has ended; ``ended``: whether it, or each of
        its replicas, has; ``step``: the last committed step; ``updated_s_ago``: seconds since the state was written or,
        with replicas, since the last commit; ``stale``: whether a run that has not ended has written nothing for too
        long; ``gone``; ``saves``: the last save of a checkpoint, "" before the first. Further names are those of
        :func:`_of_replicas` or :func:`_of_workers`. None stands for what is unknown.
    """
    ended = record.has_ended
    own = _of_replicas(record, now) if record.has_quorum else _of_workers(record.only, now)
    age, limit = own["updated_s_ago"], max(STALE_S, 3 * (own.get("step_s") or 0.0))
    gone = "" if ended else gone
    common = {"phase": record.state} if ended else {}
    common |= {"ended": ended, "gone": gone, "stale": not ended and not gone and age is not None and age > limit}
    return {**own, **common, "saves": last_save([event for _, event in record.history], now)}


def _of_workers(run: ReplicaRecord, now: float) -> Values:
    """Return what ``status.json`` tells of a run with one replica; what it lacks follows from the events.

    Returns:
        ``lag``: steps between the committed step and the newest snapshot that all peers hold; ``members``: the workers,
        each with its logical rank (None for a standby), what it is doing, the last step that it reported, and the lag
        of its newest snapshot; ``last_recovery``: the most recent one; ``recovered``: number of those that are over;
        ``protected``: whether a worker has ever joined under protection; ``hot_swap``: whether peers hold copies of
        snapshots, and standbys take over; ``nodes``: number of nodes; ``lacking``: sentences about what is missing from
        the run's files; ``limits``: its timeouts that are not the defaults, in seconds; ``stragglers``: sentences about
        ranks that are persistently slower than others with the same work; ``health``: what nodes have found about
        themselves, the oldest first; ``hosts``: node -> host name, for all nodes that have joined; ``lost``: the nodes
        that were lost (:func:`lost_nodes`).
    """
    stored, hosts, found = run.status, events.hosts(run.events), run.recoveries
    updated = records.number(stored, "updated") or (run.events[-1].wall if run.events else None)
    step, protected = records.last_step(run), stored.get("protected")
    if protected is False and run.metrics:  # the control plane hears nothing of such a run's steps
        step = max(step or 0, run.metrics[-1]["step"])
    epoch = next((event.epoch for event in reversed(run.events) if event.epoch is not None), None)
    ended, members = run.state not in (NOT_ENDED, NOTHING), _members(stored, hosts)
    return {
        "phase": str(stored.get("phase") or "unknown"),
        "step": step,
        "updated_s_ago": None if updated is None else max(0.0, now - updated),
        "epoch": None if protected is False else _whole(stored.get("epoch"), epoch),
        "lag": None if ended else _whole(stored.get("lag")),
        "restarts": _whole(stored.get("restarts")),
        "members": _at_the_end(members, run.state, step) if ended else members,
        "last_recovery": _recovery_values(found[-1]) if found else None,
        "recovered": sum(r.is_over for r in found),
        "protected": protected if isinstance(protected, bool) else None,
        "hot_swap": stored.get("hot_swap") is not False,
        "nodes": len(stored["nodes"]) if isinstance(stored.get("nodes"), dict) else 1,
        "lacking": records.lacking(run),
        "limits": stored["limits"] if isinstance(stored.get("limits"), dict) else {},
        "stragglers": _stragglers(stored.get("stragglers")),
        "health": health(run),
        "hosts": hosts,
        "lost": lost_nodes(run, now),
    }


def _of_replicas(record: Record, now: float) -> Values:
    """Return what the commit logs of a run of FT-HSDP tell of its replicas.

    Returns:
        ``quorum``: number of the last quorum that committed; ``healthy``: the replicas that contributed in it;
        ``behind``: those that fetched the state in it; ``step_s``: duration of a normal step in seconds; ``replicas``:
        of each replica its state, the last step that it committed, the quorum of that commit, its position in its
        stream of samples, seconds since that commit, and the host names of its nodes.
    """
    last = record.steps[-1] if record.steps else None
    states = {lane.replica: lane.state for lane in record.lanes}
    return {
        "phase": "training" if last else "starting",
        "step": last.number if last else None,
        "updated_s_ago": max(0.0, now - last.when) if last else None,
        "quorum": last.commit.quorum if last else None,
        "healthy": list(last.commit.healthy) if last else [],
        "behind": list(last.commit.behind) if last else [],
        "step_s": record.pace.normal[-1] if last else None,
        "replicas": [_replica(record, number, states, last, now) for number in range(record.count)],
    }


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


def _stragglers(stored: Any) -> list[str]:
    """Return a sentence for each straggler in the status file of a run, by logical rank."""
    known = stored.items() if isinstance(stored, dict) else ()
    slow = [(rank, one) for rank, one in known if isinstance(one, dict) and rank.isdecimal()]
    return [
        f"rank {rank} ({one.get('worker')}): its own work takes {times(one.get('ratio'))} as long as that of the "
        f"others, mostly {one.get('cause')}, after step {one.get('step')}"
        for rank, one in sorted(slow, key=lambda item: int(item[0]))
    ]


def times(ratio: Any) -> str:
    """Return a ratio that was stored of a straggler as text, such as "1.50 times"."""
    return f"{ratio:.2f} times" if isinstance(ratio, int | float) else "an unknown number of times"


def _gone(record: Record, found: Values) -> str:
    """Return why no live process directs the run any more, "" while one does, or may do so.

    Of replicas, the launcher that hosts the quorum server holds a lease.
    """
    if record.has_quorum:
        return gone(record.folder / election.LAUNCHERS, None, _NODES, is_steady=True)
    return gone(record.folder, found["updated_s_ago"], found["nodes"])


def lost_nodes(run: Run, now: float) -> list[Values]:
    """Return the nodes that the run has lost, in the order of their losses. ``now``: seconds since 1970.

    Returns:
        ``node``; ``host``, "" where unknown; ``reason``; ``lost_s_ago``: seconds since the loss, None where unknown;
        ``back_as``: the name under which an agent of the same node has joined again, "" if none has.
    """
    hosts, found = events.hosts(run.events), {}
    for event in run.events:
        node = event.node or ""
        if event.name == events.FAULT_DETECTED and event.detail.get("signal") == NODE_LOST and node not in found:
            found[node] = _lost(node, hosts, _why_lost(event), max(0.0, now - event.wall))
        elif event.name == events.AGENT_JOINED:  # an agent that joins again is called n1-2
            for name, lost in found.items():
                if name.partition("-")[0] == node.partition("-")[0]:
                    lost["back_as"] = lost["back_as"] or node
    nodes = run.status.get("nodes")
    if run.state == NOT_ENDED and isinstance(nodes, dict):  # a node without workers has no event of its loss
        gone = {name: str(why) for name, why in nodes.items() if why != "up" and not str(why).startswith("suspect:")}
        found |= {name: _lost(name, hosts, why, None) for name, why in gone.items() if name not in found}
    return list(found.values())


def _lost(node: str, hosts: Mapping[str, str], why: str, ago: float | None) -> Values:
    return {"node": node, "host": hosts.get(node, ""), "reason": why, "lost_s_ago": ago, "back_as": ""}


def _why_lost(event: Event) -> str:
    """Return the reason without the words "node n1 (gpu0137) is lost", with which it begins."""
    return str(event.detail.get("reason", "")).partition(" is lost: ")[2]


def lost_sentence(lost: Values, hosts: Mapping[str, str]) -> str:
    """Return text such as "n1 (gpu0137), 2 min ago: nothing was heard of its agent for 3.7 s"."""
    when = "" if lost["lost_s_ago"] is None else f", {seconds(lost['lost_s_ago'])} ago"
    why = f": {lost['reason']}" if lost["reason"] else ""
    back = f"; joined again as {lost['back_as']}" if lost["back_as"] else ""
    return f"{events.named(lost['node'], hosts)}{when}{why}{back}"


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


def as_text(found: Values, folder: str) -> str:
    """Return the status as a few lines and a table of the workers or of the replicas."""
    has_replicas = "replicas" in found
    facts = [("run", folder), ("state", _state(found)), *([("", found["gone"])] if found["gone"] else [])]
    facts.append(("step", _shown(found["step"])))
    facts += _quorum_facts(found) if has_replicas else _control_facts(found)
    facts += [("saved", found["saves"])] if found["saves"] else []
    facts += [] if has_replicas else _node_facts(found)
    lines = [f"{name:<10} {value}" for name, value in facts]
    if has_replicas:
        lines += ["", _replica_table(found["replicas"])]
    elif found["members"]:
        lines += ["", _member_table(found["members"], found["hosts"])]
    return "\n".join(lines)


def _state(found: Values) -> str:
    has_replicas, age = "replicas" in found, found["updated_s_ago"]
    state = f"gone (it was {found['phase']})" if found["gone"] else found["phase"]
    if age is None or (has_replicas and found["ended"]):
        return state
    when = "last step" if has_replicas else "ended" if found["ended"] else "updated"
    return f"{state}, {when} {seconds(age)} ago" + (" (stale?)" if found["stale"] else "")


def _quorum_facts(found: Values) -> list[tuple[str, str]]:
    members = [", ".join(map(str, found["healthy"])) or "-"]
    members += [f"catching up: {', '.join(map(str, found['behind']))}"] if found["behind"] else []
    which = f"{_shown(found['quorum'])} of replicas {'; '.join(members)}"
    return [("each", seconds(found["step_s"])), ("quorum", which)]


def _control_facts(found: Values) -> list[tuple[str, str]]:
    facts = [
        ("epoch", _shown(found["epoch"])),
        ("snapshots", _snapshots(found)),
        ("restarts", _shown(found["restarts"])),
        ("recovered", str(found["recovered"])),
        ("last", _last(found["last_recovery"])),
    ]
    return facts + [("lost", lost_sentence(lost, found["hosts"])) for lost in found["lost"]]


def _node_facts(found: Values) -> list[tuple[str, str]]:
    facts, health = [], found["health"]
    if found["limits"]:
        facts.append(("limits", ", ".join(f"{name} = {value:g} s" for name, value in found["limits"].items())))
    facts += [("straggler", text) for text in found["stragglers"]]
    facts += [("health", text) for text in health[-_MOST_FINDINGS:]]
    if len(health) > _MOST_FINDINGS:
        facts.append(("", f"and {len(health) - _MOST_FINDINGS} earlier, which ft report shows"))
    return facts + [("records", text) for text in found["lacking"]]


def _member_table(members: Sequence[Values], hosts: Mapping[str, str]) -> str:
    rows = [
        (
            "standby" if m["rank"] is None else str(m["rank"]),
            m["worker"],
            events.named(m["node"] or "-", hosts),
            m["state"] or "-",
            _shown(m["step"]),
            _shown(m["lag"]),
        )
        for m in members
    ]
    return table(("rank", "worker", "node", "state", "step", "lag"), rows, right=(4, 5))


def _replica_table(replicas: Sequence[Values]) -> str:
    rows = [
        (
            str(m["replica"]),
            m["state"],
            *(_shown(m[name]) for name in ("step", "quorum", "position")),
            seconds(m["age"]),
        )
        for m in replicas
    ]
    head = ("replica", "state", "step", "quorum", "samples taken", "last step ago")
    if len({host for member in replicas for host in member["hosts"]}) > 1:
        head = (*head, "hosts")
        rows = [(*row, _few(member["hosts"])) for row, member in zip(rows, replicas, strict=True)]
    return table(head, rows, right=(2, 3, 4, 5))


def _few(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return ", ".join(hosts[:_MOST_HOSTS]) + more or "-"


def _recovery_values(last: Recovery) -> Values:
    gravest = last.faults[0] if last.faults else None
    return {
        "number": last.number,
        "outcome": last.outcome,
        "reason": last.reason,
        "headline": last.headline,
        "worker": gravest.worker if gravest else None,
        "node": gravest.node if gravest else None,
        "host": last.hosts.get(gravest.node or "", "") if gravest else "",
        "total_s": last.total,
        "phases_s": last.phases,
        "step": last.step,
    }


def _members(stored: Values, hosts: Mapping[str, str]) -> list[Values]:
    seats, standbys = stored.get("seats"), stored.get("standbys")
    found = []
    if isinstance(seats, dict):
        ordered = sorted(seats.items(), key=lambda item: _whole(item[0], 0))
        found += [_member(_whole(rank), seat, "training", hosts) for rank, seat in ordered]
    if isinstance(standbys, list):
        found += [_member(None, standby, "standby", hosts) for standby in standbys]
    return found


def _member(rank: int | None, values: Any, state: str, hosts: Mapping[str, str]) -> Values:
    """Return what the control plane has written of a worker."""
    values = values if isinstance(values, dict) else {}
    beat = values.get("beat")
    values = {**values, **beat} if isinstance(beat, dict) else values
    worker = str(values.get("worker", "-"))
    node = str(values.get("node") or worker.rpartition(".")[0])
    doing = str(values.get("doing") or state)
    where = str(values.get("where") or "") if doing != "compute" else ""
    place = {"rank": rank, "worker": worker, "node": node, "host": hosts.get(node, "")}
    steps = {name: _whole(values.get(name)) for name in ("step", "lag")}
    return {**place, "state": f"{doing}: {where}" if where else doing, **steps}


def _at_the_end(members: list[Values], state: str, step: int | None) -> list[Values]:
    """Return the members as they were at the end of the run.

    The last heartbeats were sent before the end, so their steps may be too small. In a run that has finished, every
    rank has committed the last step.
    """
    if is_planned_end(state):
        done = {"state": "finished", "lag": None}
        return [{**m, **done, "step": None if m["rank"] is None else step} for m in members]
    return [{**m, "state": f"ended (last seen: {m['state']})", "lag": None} for m in members]


def _snapshots(found: Values) -> str:
    lag = found["lag"]
    if found["protected"] is False:
        when, protects = ("ever joined", "protected") if found["ended"] else ("joined", "protects")
        return f"none: no worker has {when} the run, and nothing {protects} it"
    if not found["hot_swap"]:
        return "none: the other replicas hold the state"
    if lag is None:
        return "-"
    return f"{lag} behind the committed step" if lag else "all peers hold the committed step"


def _last(recovery: Values | None) -> str:
    if recovery is None:
        return "no recovery"
    reason = f": {recovery['headline']}" if recovery["headline"] else ""
    took = "" if recovery["outcome"] == UNDER_WAY else f" in {seconds(recovery['total_s'])}"
    return f"recovery {recovery['number']}, {recovery['outcome']}{took}{reason}"


def _replica(record: Record, number: int, states: dict[int, str], last: Step | None, now: float) -> Values:
    own = record.replicas.get(number)
    latest = max(own.commits, key=lambda commit: (commit.quorum, commit.step), default=None) if own else None
    over = own.state if own is not None and own.state not in (NOT_ENDED, NOTHING) else ""
    return {
        "replica": number,
        "state": over or states.get(number, "no folder" if own is None else "starting"),
        "step": latest.step if latest else None,
        "quorum": latest.quorum if latest else None,
        "position": last.commit.positions.get(number, 0) if last else None,
        "age": max(0.0, now - latest.wall) if latest else None,
        "hosts": _hosts(own.events) if own is not None else [],
    }


def _hosts(history: Sequence[Event]) -> list[str]:
    """Return the host names of the nodes of a replica; an agent that joins again is called n1-2."""
    latest = {node.partition("-")[0]: host for node, host in events.hosts(history).items()}
    return list(dict.fromkeys(latest.values()))


def _shown(value: int | None) -> str:
    return "-" if value is None else str(value)


def _whole(value: Any, otherwise: int | None = None) -> int | None:
    try:
        return otherwise if value is None else int(value)
    except (ValueError, TypeError):
        return otherwise
