"""Conversations about records: what is told of recoveries, crashes and hangs, and of the health of a node."""

import json
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path

from conversations import Player
from histories import START, History
from planted_crashes import ORDERS, TEXTS

from ft.base import events
from ft.faults.hang.causes import diagnose, over_time
from ft.faults.hang.inspection import SERVER, Departure, Inspection, Operation, Rank, ReplicaGroup, Thread
from ft.faults.hang.replicas import combine
from ft.job.agent.console import cause_of_crash
from ft.job.control.inspections import judge
from ft.observe.diagnose.hang import as_text as hang_as_text
from ft.observe.diagnose.hang import as_values
from ft.observe.diagnose.hang_picture import png
from ft.record.block import describe, what_differs
from ft.record.recoveries import recoveries

# --- the report of recoveries -----------------------------------------------------------------------------------------


class Recoveries(Player):
    """The history of a run, made by hand; the commands are events, with their seconds since the start of the run."""

    plays = "history"
    history: History

    def do_history(self, world_size=4):
        """A run that trains from second 1.1 on."""
        self.history = History(world_size)

    def do_inject(self, at, *ranks, **how):
        for rank in ranks:
            self.history.inject(at, rank, **how)

    def do_detect(self, at, *ranks, step=20, **how):
        for rank in ranks:
            self.history.detect(at, rank, step, **how)

    def do_held(self, **seats):
        """From now on these workers hold these ranks: ``r2=n1.w0``."""
        self.history.seats.update({rank[1:]: worker for rank, worker in seats.items()})

    def do_recoveries(self):
        """Show what is told of each recovery, and what belongs to it without being told."""
        return [line for one in recoveries(self.history.events) for line in self._told(one)]

    def _told(self, one) -> list[str]:
        injected = ", ".join(f"{event.detail['kind']} of rank {event.rank}" for event in one.injected) or "nothing"
        over = "over" if one.is_over else "not over"
        more = f"injected {injected}; epoch {one.closed} to {one.epoch}; attempts {one.attempts}; {over}"
        return [*describe(one).splitlines(), *filter(None, (one.headline, more, what_differs(one)))]


class Page(HTMLParser):
    """A page of a report: tags are nested, and nothing is fetched from elsewhere or run.

    Attributes:
        lines: the texts, a row of a table or another block in a line, without style sheets.
        tags: names of all elements.
    """

    def __init__(self, path: Path):
        super().__init__()
        self._open, self.lines, self.tags, self._begun = [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == [] and "script" not in self.tags
        assert (path.parent / "timeline.png").read_bytes().startswith(b"\x89PNG")
        assert not list(path.parent.glob("*.tmp"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self._begun += " | " * (tag in ("td", "th"))
        if tag not in ("meta", "img", "br", "link"):
            self._open.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href") or value.startswith("data:"), f"{value} is fetched"

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag
        if tag not in ("td", "th", "a", "b", "code", "span", "i", "strong", "em"):
            self.lines += [line.strip(" |") for line in self._begun.splitlines() if line.strip(" |")]
            self._begun = ""

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self._begun += data


class Record(Recoveries):
    """The folder of a run, made by hand, and what commands of ``ft`` say of it."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._root, self._count = folder, 0

    def do_history(self, world_size=4, is_started=True):
        """A run of its own; without ``is_started`` its agents have yet to join."""
        self._count += 1
        self.folder, self.now = self._root / str(self._count), 0.0
        self.folder.mkdir()
        self._of = {}
        self._begin("", world_size, is_started)

    def do_in(self, name, world_size=4):
        """What follows is the history of a run or of a replica in this folder below."""
        self._of.pop("", None)
        self._begin(name, world_size)

    def _begin(self, name: str, world_size: int, is_started: bool = True) -> None:
        self.history = self._of[name] = History(world_size)
        self.history.events = self.history.events[: None if is_started else 1]
        self.place = self.folder / name

    def ft(self, words):
        self._write()
        return super().ft(words)

    def _write(self) -> None:
        for name, history in self._of.items():
            (self.folder / name).mkdir(exist_ok=True)
            (self.folder / name / "events.jsonl").unlink(missing_ok=True)
            with events.EventLog(self.folder / name / "events.jsonl") as log:
                for event in history.events:
                    log.write(event)

    def do_torn(self, *names):
        """A file ends within a line, and no event follows any more."""
        self._write()
        self._of = {}
        for name in names:
            self._append(name, (self.place / name).read_text()[:40])

    def do_bare(self):
        """There is no file of events."""
        self._of = {}

    def do_page(self, *patterns):
        """Show the lines of ``report.html`` but those of its table of events; with patterns: those that have one."""
        lines = self._page()
        lines = lines[: lines.index("Events") if "Events" in lines else None]
        return [line for line in lines if not patterns or any(str(pattern) in line for pattern in patterns)]

    def do_page_events(self, number):
        """Show the first rows of the table of events in ``report.html``."""
        lines = self._page()
        return lines[lines.index("Events") :][: number + 2]

    def _page(self) -> list[str]:
        return Page(self.folder / "report.html").lines

    def do_show(self, name):
        """Show a file."""
        return (self.folder / name).read_text().splitlines()

    def do_at_the_end(self, *shown):
        """Show what ``ft run`` says at its end of a crash, if it has shown the ends of these workers' logs."""
        self._write()
        return cause_of_crash(self.folder, set(shown)).splitlines()

    def do_steps(self, number, first=1, losses=()):
        """Training steps up to this one are in the file of metrics, with these losses or usual ones."""
        for step in range(first, number + 1):
            loss = losses[step - 1] if losses else 2 + 4 / step
            values = {"step": step, "loss": loss, "step_time_s": 0.1, "tokens_per_s": 9.0}
            self._append("metrics.jsonl", json.dumps(values) + "\n")

    def do_control(self, age=0.5, **values):
        """The control plane has written its status, so many seconds ago."""
        beat = {"age_s": 0.1, "epoch": 1, "step": 19, "doing": "wait", "since_s": 0.2, "where": "dp group", "lag": 1}
        seat = {"worker": "n0.w0", "node": "n0", "pid": 7}
        status = {
            **{"updated": START + self.now - age, "phase": "running", "epoch": 1, "step": 20, "restarts": 0, "lag": 1},
            "seats": {"10": {**seat, "worker": "n0.w10"}, "2": {**seat, "beat": beat}},
            "standbys": [{"worker": "n0.w5", "node": "n0", "pid": 9}],
        }
        (self.place / "status.json").write_text(json.dumps({**status, **values}))

    def do_workers(self, *ranks):
        """The workers of these ranks have been started, and have made two steps; without ranks: of all."""
        for rank in ranks or range(len(self.history.seats)):
            worker = self.history.seats[str(rank)]
            self.history.say(3.0, events.WORKER_STARTED, node=worker.split(".")[0], worker=worker, rank=rank, pid=rank)
            self._append(f"logs/{worker}.log", "step 1\nstep 2\n")

    def do_log(self, rank, *names):
        """The worker of a rank has written these texts of ``planted_crashes``, or other words."""
        for name in names:
            self._append(f"logs/{self.history.seats[str(rank)]}.log", TEXTS.get(name, f"{name}\n"))

    def do_journal(self, at, kind, *orders, **values):
        """The control plane has received a report, and given orders."""
        decisions = [{"reason": "", "orders": [ORDERS[name] for name in orders]}] if orders else []
        entry = {"wall": START + at, "now": at, "report": {"kind": kind, **values}, "decisions": decisions}
        self._append("journal.jsonl", json.dumps(entry) + "\n")

    def do_exits(self, at, rank, code, *orders):
        self.do_journal(
            at, "WorkerExited", *orders, worker=self.history.seats[str(rank)], node="n0", code=code, attached=False
        )

    def do_fails(self, at, rank, kind, message, *orders, log=""):
        place = {"worker": self.history.seats[str(rank)], "epoch": self.history.epoch, "step": 2}
        kinds, trace = [kind, "Exception", "BaseException"], TEXTS.get(log, "")
        self.do_journal(at, "WorkerFailed", *orders, **place, kinds=kinds, message=message, trace=trace)

    def do_stop(self, at, code=1, message="it ended"):
        self.history.say(at, events.STOPPED, code=code, message=message)

    def do_mismatch(self, at, rank, step, attempt=1, **values):
        """Two executions of an operator have differed."""
        told = {
            **{"operator": "mm", "phase": "backward", "layer": 3, "microbatch": 2, "how": "at once", "note": ""},
            **{"host": f"node{rank}", "device": "cuda:1 (H200)", "elements": 3, "of": 4096, "chunk": 0, "index": 7},
        }
        place = {"rank": rank, "epoch": self.history.epoch, "step": step, "attempt": attempt}
        self.history.say(at, events.DMR_MISMATCH, **place, **{**told, **values})

    def do_verdict(self, at, step, action, *blamed, attempt=1, ranks=()):
        values = {"action": action, "reason": "it went wrong", "ranks": list(ranks), "blamed": list(blamed)}
        self.history.say(at, events.DMR_VERDICT, step=step, epoch=self.history.epoch, attempt=attempt, **values)

    def do_clean(self, at, step, attempt=2):
        self.history.say(at, events.DMR_CLEAN, step=step, epoch=self.history.epoch, attempt=attempt)

    def do_covered(self, at, *ranks, counts):
        for rank in ranks or range(4):
            place = {"rank": rank, "epoch": self.history.epoch, "step": 1}
            self.history.say(at, events.DMR_COVERED, **place, strategy="piggyback", counts=counts)

    def do_rebuilt(self, at, step, stage, weights=(0.25, 0.75)):
        """A pipeline stage was rebuilt from its neighbours."""
        detail = {"stage": stage, "strategy": "weighted", "weights": list(weights), "seconds": 0.04}
        self.history.say(at, events.STAGE_REBUILT, epoch=1, step=step, **detail)

    def do_agent(self, number, name="", late=0.0, **values):
        """The agent of a node has joined, with its clock so many seconds late; a name alone: it has only started."""
        name = name or f"n{number}"
        self._append(f"nodes/{name}", "")
        told = {"host": f"10.0.0.{number}", "machine": f"host{number}", "paths": {}, "about": {"--nnodes": "2"}}
        told |= {"interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.2"}, "clock": START + 2.0 - late, **values}
        self.history.say(2.0, events.AGENT_JOINED, node=name, **told)

    def _append(self, name: str, text: str) -> None:
        (self.place / name).parent.mkdir(parents=True, exist_ok=True)
        with (self.place / name).open("a") as file:
            file.write(text)


# --- the causes of hangs ----------------------------------------------------------------------------------------------

_OPERATION = re.compile(r"([\w/]+)(?::(\w+))?(?:@(\d+))?(?:#(\d+))?(?:\((.*)\))?")


def _operation(text: str, **more) -> Operation:
    """Return an operation: ``GROUP``, or ``GROUP:NAME@PEER#NUMBER(SIZES)``; by default the first all_reduce."""
    group, name, peer, number, sizes = _OPERATION.fullmatch(text).groups()
    name, peer, number = name or "all_reduce", None if peer is None else int(peer), int(number or 1)
    return Operation(group, name, number, peer, (sizes,) if sizes else (), **more)


class Hang(Player):
    """What the ranks of a run say when it hangs, and what ``ft diagnose hang`` makes of that."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.replicas, self.earlier = {}, []

    def do_groups(self, **groups):
        """The process groups of a run, of whose ranks nothing is known yet."""
        self.groups = {name: tuple(map(int, ranks.split(","))) for name, ranks in groups.items()}
        self.ranks, self.hosts = {}, {}

    def do_hosts(self, **hosts):
        self.hosts = hosts

    def do_rank(self, number, *pending, departs="", stands=(), age_s=None, node="n0", counts=None, about="", **more):
        """What one rank says.

        Args:
            number: the rank.
            pending: the operations in which it waits.
            departs: how its step differs from the one before: kind, operation that was due, operation that came.
            stands: the calls in which its training thread is.
            age_s: seconds since it has started the operations.
            node: its node.
            counts: channel -> number of the last operation there, beside those of ``pending``.
            about: what the operations are about.
            more: further fields of :class:`ft.faults.hang.inspection.Rank`.
        """
        behind = {"awaited": more.pop("awaited", True), "about": about, "age_s": age_s}
        operations = tuple(_operation(text, **behind) for text in pending)
        counted = {one.channel: one.sequence for one in operations} | (counts or {})
        if departs:
            kind, *both = departs.split()
            more["departure"] = Departure(kind, *map(_operation, both))
        if stands:
            more["threads"] = (Thread("MainThread", tuple(stands), trains=True),)
        self.ranks[number] = Rank(number, f"{node}.w{number}", node, counts=counted, operations=operations, **more)

    def do_diagnose(self):
        inspection = Inspection(self.ranks, self.groups, hosts=self.hosts)
        return [line for line in hang_as_text(inspection, diagnose(inspection)).splitlines() if line]

    def do_replica(self, number, waits=(), members=(0, 1, 2), why="asked for"):
        """A replica of two ranks, which follow; the quorum server says that it waits for the replicas ``waits``."""
        self.do_groups(**{"DP/3": "0,1", "AGREEMENT/9": "0,1"})
        across = {f"{name}/8/{r}": ReplicaGroup(tuple(members), r) for name in ("RING", "CONNECT") for r in (0, 1)}
        across["QUORUM"] = ReplicaGroup(tuple(waits), 0)
        self.replicas[number] = self.ranks, self.groups, across, why

    def combined(self, server=None, **how) -> Inspection:
        """Return the inspection of all replicas that were told of. ``server``: see ``do_combine``."""
        inspections = {}
        for number, (ranks, groups, across, why) in self.replicas.items():
            for rank, one in ranks.items():
                names = [operation.group for operation in one.operations]
                across |= {name: ReplicaGroup((), rank) for name in names if name.startswith(("STATE", "FETCH"))}
                across |= {name: ReplicaGroup((1,), rank) for name in one.counts if name.startswith("STATE")}
            inspections[number] = Inspection(ranks, groups, 100.0, why, across)
        process = None if server is None else Rank(SERVER, "process 77", "n0", server, answers=False)
        self.replicas = {}
        return combine(inspections, server=process, **how)

    def do_then(self):
        """This was an inspection of all replicas; later ones follow."""
        self.earlier.append(self.combined())

    def do_combine(self, **how):
        """Show the cause in all replicas. ``server``: state of the quorum server's process, which answers nobody."""
        inspection = self.combined(**how)
        found, self.earlier = over_time([*self.earlier, inspection]), []
        assert png(inspection, found)
        causes = [(one["replica"], one["rank"], one["kind"]) for one in as_values(inspection, found)["causes"]]
        return [*filter(None, hang_as_text(inspection, found).splitlines()), f"causes: {causes}"]

    def do_numbers(self):
        """Show how ranks and groups are called in the inspection of all replicas."""
        seen = self.combined()
        for number, rank in sorted(seen.ranks.items()):
            place, peers = seen.places[number], [one.peer for one in rank.operations]
            yield f"{number}: replica {place.replica} rank {place.rank}, counts {rank.counts}, peers {peers}"
        yield from (f"{name}: {ranks}" for name, ranks in sorted(seen.groups.items()))
        yield f"replicas that were not asked: {sorted(seen.unasked)}, that have asked: {sorted(seen.takers)}"

    def do_judge(self, home):
        """Show what the control plane of a replica hears of its inspection."""
        found = judge(1, self.combined(home=home))
        return [*(f"ranks {one.ranks}: {one.why}" for one in found.causes), f"ranks that wait: {found.waiting}"]


# --- dumps of torch's flight recorder ---------------------------------------------------------------------------------

_RECORDED = re.compile(r"(?P<name>[\w>-]+(?::[\w<>-]+)?)#(?P<number>\d+)(?P<open>\?)?(?:\*(?P<size>\d+))?")


class Traces(Player):
    """Dumps of torch's flight recorder in folders, which ``ft diagnose hang --traces`` reads."""

    FRAMES = (("all_reduce", "/x/torch/distributed/c.py", 1), ("step", "train.py", 7))

    def do_folder(self):
        """Another folder, which is RUN from now on."""
        self.folder = self.folder / "next"
        self.folder.mkdir()

    def do_dump(self, rank, *recorded, form="pickle", name="nccl_trace_rank_{}", **about):
        """Write the dump of a rank.

        Args:
            rank: the rank.
            recorded: its operations, ``NAME#NUMBER``, and messages, ``send:0->1#NUMBER``; with ``?`` one that has not
                ended, with ``*5`` one of five values.
            form: ``pickle`` or ``json``.
            name: name of the file.
            about: ``version``, ``group`` (its number and description), ``ranks`` (of the group, as text; None: no group
                is described), ``first`` (number of the first operation in the buffer).
        """
        group, ranks = about.get("group", ["0", "default_pg"]), about.get("ranks", "[0, 1, 2]")
        entries = [self._entry(n, text, group) for n, text in enumerate(recorded, about.get("first", 0))]
        described = {group[0]: {"name": group[0], "desc": group[1], "ranks": ranks}} if ranks else {}
        values = {"version": str(about.get("version", "2.10")), "entries": entries}
        values |= {"pg_config": described, "pg_status": {}}
        path = self.folder / name.format(rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(values) if form == "pickle" else json.dumps(values).encode())

    def _entry(self, record: int, text: str, group: list[str]) -> dict:
        match = _RECORDED.fullmatch(text)
        shape, name, is_over = [int(match["size"] or 4)], match["name"].replace(":", " "), match["open"] is None
        return {
            **{"record_id": record, "pg_id": 0, "process_group": group, "p2p_seq_id": 0, "is_p2p": ":" in text},
            **{"collective_seq_id": int(match["number"]), "profiling_name": f"nccl:{name}", "retired": is_over},
            **{"state": "completed" if is_over else "started", "time_created_ns": record},
            **{"input_sizes": [shape], "output_sizes": [shape], "input_dtypes": ["Float"], "output_dtypes": ["Float"]},
            "frames": [dict(zip(("name", "filename", "line"), frame, strict=True)) for frame in self.FRAMES],
        }

    def do_torn(self, rank):
        """The dump of a rank ends after 40 bytes."""
        path = self.folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(path.read_bytes()[:40])
