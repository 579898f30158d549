"""Say why a run has never made its first step, from its folder: who joined, what differs, what was still awaited.

The findings are a pure function of what was read; reading is separate.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.base import bounded_json, events, files
from ft.base.errors import UserError
from ft.base.events import Event
from ft.platform import election, network
from ft.record import crash, run
from ft.show.text import seconds

CLOCK_AHEAD_S, CLOCK_BEHIND_S = 5.0, 60.0
"""Clock differences that are worth a word. An agent says the time of its clock before its message travels, so a clock
that seems late may only belong to a node that waited for the control plane."""
_CONNECT_S = 3.0
_OUTPUT = "folder of "


@dataclass(frozen=True)
class Obstacle:
    """One reason why the run has not started, with what to do; ``is_cause``: whether it alone keeps a run from
    starting.
    """

    problem: str
    fix: str = ""
    is_cause: bool = True


@dataclass(frozen=True)
class Node:
    """One agent of the run.

    Attributes:
        claimed_at: time at which it took its name, the first thing that it does, in seconds since 1970; None: unknown.
        joined: the event of its joining, None if the control plane never heard of it.
        last_words: the last lines of its warm pool's log.
        is_known: whether any event names it, so that the control plane has heard of it.
    """

    name: str
    claimed_at: float | None = None
    joined: Event | None = None
    last_words: tuple[str, ...] = ()
    is_known: bool = False

    @property
    def rank(self) -> int:
        number = self.name.removeprefix("n").partition("-")[0]
        return int(number) if number.isdecimal() else -1

    def told(self, name: str) -> dict[str, str]:
        """Return one of the mappings that the agent has told, empty if it told none."""
        values = self.joined.detail.get(name) if self.joined is not None else None
        return {str(key): str(value) for key, value in values.items()} if isinstance(values, Mapping) else {}

    def __str__(self) -> str:
        machine = self.joined.detail.get("machine") if self.joined is not None else ""
        return f"{self.name} ({machine})" if machine else self.name


@dataclass(frozen=True)
class Start:
    """What a run's folder says about its start.

    Attributes:
        started: logical ranks whose workers were started.
        ready: logical ranks whose workers have connected.
        has_begun: whether a step has begun, as far as the run tells: a script of one's own may not tell.
        stopped: the control plane's message at the end, None if the run has not ended.
        problems: why the control plane has refused the run.
        refused: messages of agents that could not take part: node -> reason.
        starts: number of times that a run has begun in the folder.
        lease: address of the control plane, "" if none has ever answered.
        endpoint: host:port of the control plane that was tried from this machine, "" if none was.
        unreachable: why it cannot be connected to, "" if it can.
        holder: the process of this machine that listens there, "" if none does or it is another machine.
        crashed: the first cause of the workers' errors, "" without errors.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    expected: int = 0
    world_size: int = 0
    started: frozenset[int] = frozenset()
    ready: frozenset[int] = frozenset()
    has_begun: bool = False
    stopped: str | None = None
    problems: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    starts: int = 0
    lease: str = ""
    endpoint: str = ""
    unreachable: str = ""
    holder: str = ""
    control_log: Sequence[str] = ()
    crashed: str = ""


def findings(start: Start, now: float) -> list[Obstacle]:
    """Return why the run has not started, the causes first. ``now``: time in seconds since 1970."""
    found = [] if start.has_begun else _causes(start, now)
    found += _clocks(start.nodes.values())
    if start.starts > 1:
        found.append(
            Obstacle(f"{start.starts} runs have begun in this folder", "give every run a --run-dir of its own", False)
        )
    unique = list(dict.fromkeys(found))
    if start.stopped and not start.has_begun and not any(one.is_cause for one in unique):
        unique.insert(0, _sentence(start.stopped))
    return sorted(unique, key=lambda one: not one.is_cause)


def _causes(start: Start, now: float) -> list[Obstacle]:
    found = [_sentence(problem) for problem in start.problems]
    if not start.problems:
        found += [_sentence(f"{node}: {reason}") for node, reason in start.refused.items()]
        found += _differences(list(start.nodes.values()))
    return [*found, *_absent(start, now), *_control_plane(start), *_workers(start)]


def _sentence(text: str) -> Obstacle:
    """Return the finding of a message whose last lines say what to do."""
    problem, _, fix = text.partition("\n  fix: ")
    return Obstacle(problem, " ".join(line.strip() for line in fix.splitlines()))


def _differences(nodes: Sequence[Node]) -> list[Obstacle]:
    """Compare what the agents have told, for runs that ended before the control plane could."""
    told = [node for node in nodes if node.joined is not None]
    found = []
    for kind, fix in (("about", "install the same and give the same flags everywhere"), ("paths", "mount it there")):
        for name in sorted({name for node in told for name in node.told(kind)}):
            of_value: dict[str, list[Node]] = {}
            for node in told:
                of_value.setdefault(node.told(kind).get(name, "not set"), []).append(node)
            if len(of_value) < 2 or name.startswith(_OUTPUT):
                continue
            shown = "; ".join(f"{value} on {', '.join(map(str, same))}" for value, same in of_value.items())
            found.append(Obstacle(f"{name}: {shown}", fix))
    return found


def _absent(start: Start, now: float) -> list[Obstacle]:
    """Return the nodes whose agents have not joined, and the numbers that two agents share."""
    found, names = [], start.nodes
    if not start.problems:
        for node in names.values():
            if not node.is_known:
                since = "" if node.claimed_at is None else f" {seconds(max(0.0, now - node.claimed_at))} ago"
                words = f"; the last line of its log: {node.last_words[-1]}" if node.last_words else ""
                found.append(
                    Obstacle(
                        f"the agent of {node} has started{since} and never reached the control plane{words}",
                        "see what it prints; it says within 30 s what it waits for, if it can ever know",
                    )
                )
        missing = sorted(set(range(start.expected)) - {node.rank for node in names.values()})
        if missing:
            found.append(
                Obstacle(
                    f"no agent of node(s) {', '.join(map(str, missing))} of {start.expected} has come to this folder",
                    "start ft run there, with the same --run-dir on a file system that all nodes share",
                )
            )
    of_rank: dict[int, list[Node]] = {}
    for node in names.values():
        of_rank.setdefault(node.rank, []).append(node)
    for rank, same in of_rank.items():
        if len({node.joined.detail.get("machine") for node in same if node.joined is not None}) > 1:
            shared = " and ".join(map(str, same))
            found.append(Obstacle(f"{shared} both have --node-rank {rank}", "give each node a number of its own"))
    return found


def _control_plane(start: Start) -> list[Obstacle]:
    found = []
    if not start.lease and not any(node.is_known for node in start.nodes.values()):
        words = f": {start.control_log[-1]}" if start.control_log else ""
        fix = "start ft run with --node-rank 0 in this --run-dir; it says at once if its port is taken"
        found.append(Obstacle(f"no control plane has ever answered{words}", fix))
    if start.endpoint and start.unreachable:
        fix = "give --rdzv-endpoint an address of node 0 that all nodes reach, or open the firewall for the port"
        found.append(Obstacle(f"from this machine {start.endpoint} cannot be reached: {start.unreachable}", fix))
    elif start.holder and not start.lease:
        fix = "end it, or give --rdzv-endpoint another port"
        found.append(Obstacle(f"the port of {start.endpoint} is held by {start.holder}", fix))
    return found


def _workers(start: Start) -> list[Obstacle]:
    """Return findings about workers that have failed, were never started or have not connected.

    There are none as long as agents are missing, because that explains why workers are.
    """
    if start.crashed:
        return [Obstacle(f"the workers' errors: {start.crashed}")]
    if not start.world_size or not start.started or start.problems:
        return []
    everyone = set(range(start.world_size))
    found = []
    if never := sorted(everyone - start.started):
        found.append(Obstacle(f"the workers of {crash.ranks(never)} were never started"))
    if start.ready and (late := sorted(start.started - start.ready)):
        found.append(
            Obstacle(
                f"the workers of {crash.ranks(late)} were started and have not connected",
                "see the ends of their logs; imports on a busy machine or file system take long (--limits ready_s)",
            )
        )
    return found


def _clocks(nodes: Iterable[Node]) -> list[Obstacle]:
    found = []
    for node in nodes:
        clock = node.joined.detail.get("clock") if node.joined is not None else None
        if not isinstance(clock, int | float) or not clock:
            continue
        ahead = clock - node.joined.wall
        if ahead > CLOCK_AHEAD_S or -ahead > CLOCK_BEHIND_S:
            which = "ahead of" if ahead > 0 else "behind"
            problem = f"the clock of {node} is about {seconds(abs(ahead))} {which} that of the control plane's node"
            found.append(Obstacle(problem, "let chrony or ntpd set it; times in logs cannot be compared", False))
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Start:
    """Read what a run's folder says about its start; the folder may hold hardly anything.

    Raises:
        UserError: there is no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", "give the folder that was given to ft run as --run-dir")
    happened = sorted(events.read(folder / run.EVENTS), key=lambda event: event.wall)
    record = run.Run(folder, happened)
    begun, stopped = record.first(events.RUN_STARTED), record.last(events.STOPPED)
    refused = record.last(events.START_REFUSED)
    lease = election.read(folder)
    workers = {event.worker: event.rank for event in happened if event.name == events.WORKER_STARTED}
    errors = list(crash.errors_of(folder, happened))
    first = crash.causes.first_cause(errors)
    is_crash = first is not None and first.cause.kind not in (crash.causes.TOLD, crash.causes.ENDED)
    nodes = _nodes(folder, happened)
    signs = (events.RESUMED, events.FINISHED)
    has_begun = any(map(record.first, signs)) or (folder / run.METRICS).is_file()
    return Start(
        nodes,
        _expected(nodes),
        int(begun.detail.get("world_size", 0)) if begun is not None else 0,
        frozenset(rank for rank in workers.values() if rank is not None),
        frozenset(_ready(folder / run.JOURNAL, workers)),
        has_begun,
        str(stopped.detail.get("message", "")) if stopped is not None else None,
        tuple(map(str, refused.detail.get("problems", ()))) if refused is not None else (),
        _messages(folder / "refused", begun.wall if begun is not None else 0.0),
        sum(event.name == events.RUN_STARTED for event in happened),
        lease.where if lease is not None else "",
        control_log=_last_lines(folder / "logs" / "control.log"),
        crashed=crash.as_text(first) if first is not None and is_crash and not has_begun else "",
    )


def _nodes(folder: Path, happened: Sequence[Event]) -> dict[str, Node]:
    joined = {str(event.node): event for event in reversed(happened) if event.name == events.AGENT_JOINED}
    try:
        claims = {path.name: path.stat().st_mtime for path in (folder / "nodes").glob("n*")}
    except OSError:
        claims = {}
    found = {}
    known = {event.node for event in happened}
    for name in sorted({*joined, *claims}):
        log = folder / "logs" / f"{name.partition('-')[0]}.pool.log"
        found[name] = Node(name, claims.get(name), joined.get(name), tuple(_last_lines(log)), name in known)
    return found


def _expected(nodes: Mapping[str, Node]) -> int:
    numbers = [node.told("about").get("--nnodes", "") for node in nodes.values()]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _ready(journal: Path, ranks: Mapping[str | None, int | None]) -> Iterator[int]:
    """Yield the logical ranks whose workers have connected to their agents, by the reports in the journal."""
    for entry in run.entries(journal, ('"WorkerReady"',)):
        report = entry.get("report") or {}
        rank = ranks.get(report.get("worker"))
        if rank is not None and report.get("kind") == "WorkerReady":
            yield rank


def _messages(folder: Path, since: float) -> dict[str, str]:
    """Return the messages that agents have left since a time, in seconds since 1970."""
    found = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            values = bounded_json.loads(files.read(path))
            if path.stat().st_mtime < since:
                continue
            found[str(values["node"])] = str(values["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _last_lines(path: Path, count: int = 3) -> list[str]:
    try:
        return path.read_text(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []


def as_text(name: str, start: Start, found: Sequence[Obstacle]) -> str:
    """Return the findings as text, after a line on who has joined."""
    joined = [node for node in start.nodes.values() if node.is_known]
    expected = f" of {start.expected}" if start.expected else ""
    lines = [f"{name}: {len(joined)}{expected} agents joined, {_progress(start)}"]
    for node in joined:
        addresses = ", ".join(f"{own} ({interface})" for interface, own in node.told("interfaces").items())
        if node.joined is not None:
            when, host = time.strftime("%H:%M:%S", time.localtime(node.joined.wall)), node.joined.detail.get("host")
            lines.append(f"  {node} at {when}, advertises {host}; it has {addresses}")
    for one in found:
        lines.append(("- " if one.is_cause else "- beside it: ") + one.problem.replace("\n", "\n  "))
        if one.fix:
            lines.append(f"  fix: {one.fix}")
    if not found:
        lines.append("nothing is wrong that the folder shows")
    return "\n".join(lines)


def _progress(start: Start) -> str:
    if start.has_begun:
        return "and the run has made its first step"
    return f"{len(start.started)} of {start.world_size or '?'} logical ranks have workers, no step is on record"


def as_values(start: Start, found: Sequence[Obstacle]) -> dict[str, Any]:
    """Return the findings as JSON values."""
    return {
        "has_begun": start.has_begun,
        "expected_nodes": start.expected,
        "joined": [node.name for node in start.nodes.values() if node.is_known],
        "not_joined": [node.name for node in start.nodes.values() if not node.is_known],
        "findings": [{"problem": one.problem, "fix": one.fix, "is_cause": one.is_cause} for one in found],
    }


def look(start: Start, endpoint: str) -> Start:
    """Return the start with what this machine sees of the control plane's address.

    Args:
        endpoint: host:port of the control plane; "": the address that the folder names, if the run has not ended.

    Raises:
        UserError: the endpoint is no host:port.
    """
    where = endpoint or (start.lease.removeprefix("tcp://") if start.stopped is None else "")
    host, _, port = where.rpartition(":")
    if not where or "//" in where:
        return start
    if not host or not port.isdecimal():
        raise UserError(f"--rdzv-endpoint {where} names no port", "give HOST:PORT, as to ft run")
    why = network.cannot_connect(host, int(port), _CONNECT_S)
    is_here = host in ("localhost", *network.interfaces().values())
    return replace(start, endpoint=where, unreachable=why, holder=network.listener(int(port)) if is_here else "")
