"""Conversations about judgements: failures and where ranks go, causes of crashes, health of nodes, planned faults."""

import importlib
import json
import os
import re
from dataclasses import asdict, replace

import planted_node
from conversations import Player
from planted_crashes import TEXTS
from planted_nvml import pynvml

from ft.faults import Fault, parse, read_scenario, schedule, verdict
from ft.faults.first_cause import CrashError, EqualErrors, Frame, Raised, class_of_exception, first_cause
from ft.faults.health import informed, rules
from ft.job.control import history, liveness, repairs
from ft.job.control.liveness import WorkerView
from ft.job.control.membership import place_ranks
from ft.job.control.state import Agent
from ft.job.control.timeouts import Timeouts
from ft.job.messages import AgentJoined, Beat
from ft.job.parts import GroupReport, Holdings
from ft.platform.health import EVENT, Observation, Reader, Reading
from ft.platform.health.kernel_log import parse as parse_line
from ft.record import crash


class Errors(Player):
    """Errors of a run, and which of them came first."""

    def do_errors(self):
        """A run of which nothing is known."""
        self.errors = []

    def do_error(self, rank, *chain, when=0.0, name="work", trace="a stack", worker="", **values):
        """A worker has raised ``KIND: message``, after the exceptions before it in the chain; without one: it was seen
        otherwise (``signal``, ``by_us``, ``observed`` and ``told``). ``name``: the function that has raised it."""
        frames = (Frame("train.py", 8, name),) if trace else ()
        pairs = [text.partition(": ") for text in chain]
        raised = tuple(Raised((kind,), message, frames) for kind, _, message in pairs)
        place = (worker or f"n0.w{rank}", "n0", rank)
        self.errors.append(CrashError(*place, raised, trace if chain else "", when=when, **values))

    def do_cause(self, **how):
        found = first_cause(self.errors, **how)
        if found is None:
            return ["no cause"]
        lines = [f"cause: {self._told(found.cause)}, attempt {found.cause.first.attempt}"]
        lines += [f"other: {self._told(group)}" for group in found.others]
        lines += [f"consequence: {self._told(group)}" for group in found.consequences]
        more = {"earlier attempts": found.earlier, "may have been waited for": list(found.quiet)}
        return [*lines, *(f"{name}: {value}" for name, value in more.items() if value)]

    def _told(self, group: EqualErrors) -> str:
        return f"{group.kind}, ranks {group.ranks}; {group.first.worker}: {group.first.head}"

    def do_class(self, kind, message=""):
        """Show the class of an exception."""
        return [f"{class_of_exception(Raised((kind,), message))}: {kind}: {message}"]

    def do_log(self, *parts, prefix=""):
        """Show what is read of a log of texts of ``planted_crashes`` or other lines, each with a prefix."""
        text = "".join(TEXTS.get(part, f"{part}\n") for part in parts)
        found = crash.parse("".join(prefix + line for line in text.splitlines(keepends=True)))
        if found is None:
            return ["no crash"]
        said = [f"{one.kinds[0]}: {one.message!r} in {[frame.name for frame in one.frames]}" for one in found.chain]
        return [*said, *found.text.splitlines(), *([] if found.is_last else ["something else follows"])]


GUESSES = {
    "lost": verdict.of_error(["RuntimeError"], "NCCL error: ncclRemoteError"),
    "bug": verdict.of_error(["AcceleratorError"], "CUDA error: device-side assert triggered"),
    "stop": verdict.of_exit(verdict.USER_CODE),
}


_ALIASES = {"0000:3b:00.0": "gpu1", "0000:08:00.0": "mlx5_0"}
"""PCI address -> name of the device there."""


class Health(Player):
    """What a node observes, and what follows from that."""

    def line_line(self, text):
        """Show the observation that a line of the kernel log is."""
        found = parse_line(f"[ 1234.500000] {text}", "n0", 5e9, 1e9, _ALIASES)
        return ["no event" if found is None else f"{found.name} | {found.device or '-'} | {found.value:g}"]

    def do_before(self, *observed, when=100.0):
        """An earlier reading: lists of device, name, value, kind and perhaps the text of each observation."""
        self.earlier = self._reading(observed, when)

    def do_alone(self):
        """There is no earlier reading."""
        self.earlier = None

    def do_now(self, *observed, when=100.0):
        """Show what is found in a reading, the most severe first."""
        self.found = rules(self.earlier, self._reading(observed, when))
        return [self._told(each) for each in self.found]

    def do_xid(self, *numbers, device="gpu0"):
        """Show what is found if the driver reports these Xids, each alone."""
        self.earlier = Reading("n0", 100.0, ())
        pairs = [
            (device, f"xid.{number}", float(str(number).partition(".")[0]), EVENT, "NVRM: Xid") for number in numbers
        ]
        return [line for each in pairs for line in self.do_now(each)]

    def do_informed(self, guess, device=""):
        """Show what the findings make of a guess from an error of a worker on this device."""
        before = GUESSES[guess]
        found = informed(before, self.found, device)
        if found == before:
            return ["the verdict stays"]
        marks = [name for name in ("device_unusable", "node_suspect") if getattr(found, name)]
        return [f"{found.category}, {found.action}, {found.signal}, {', '.join(marks)}: {found.reason}"]

    def _reading(self, observed, when: float) -> Reading:
        made = (Observation("n0", d, name, value, "", when, kind, *text) for d, name, value, kind, *text in observed)
        return Reading("n0", when, tuple(made))

    def _told(self, found) -> str:
        evidence = "evidence" if found.is_evidence else "no evidence"
        place = f"{found.device} {found.observation}".strip()
        return f"{place}: {found.category}, {found.action}, {evidence}: {found.reason} ({found.source})"


USUAL_GPU = {
    **{"used": 1, "errors": 0, "corrected": 4, "row_failed": 0, "retired": 0, "temperature": 60, "action": 0},
    **{"milliwatts": 310500, "reasons": 0, "replays": 12, "links": [[0, 0, 0, 0], None]},
}


class Readings(Player):
    """What is read of nodes that are made of files, and of the GPUs of ``planted_nvml``."""

    def do_node(self, files=True, nvml=False, clock=(0, 1500)):
        """Another node. ``files``: it is a healthy node's tree; ``clock``: what the kernel says of its clock."""
        self.root = self.folder / str(len(list(self.folder.iterdir())))
        self.root.mkdir()
        if files:
            planted_node.plant(self.root)
        os.environ["PLANTED_GPUS"] = str(self.root / "gpus.json")
        module = importlib.reload(pynvml) if nvml else None
        self.reader = Reader("n0", self.root, module, clock_status=lambda: clock)

    def do_gpus(self, *changes):
        """From now on NVML says this of each GPU, and the usual of one that is not lost."""
        gpus = [change if "lost" in change else {**USUAL_GPU, **change} for change in changes]
        (self.root / "gpus.json").write_text(json.dumps(gpus))

    def do_driver(self, *addresses):
        """The driver names its GPUs in /proc."""
        planted_node.gpus(self.root, *addresses)

    def line_log(self, text):
        """The kernel log has one more line."""
        self.line_log_begins(f"{text}\n")

    def line_log_begins(self, text):
        """The kernel log has one more line, whose end is not there yet."""
        with (self.root / "dev/kmsg").open("a") as file:
            file.write(text)

    def do_read(self, *only):
        """Show a reading. ``only``: devices or kinds of observations, ``aliases`` and ``unreadable``."""
        return self._told(self.reader.read(), only)

    def do_news(self, *only):
        """Show the events since the last reading."""
        return self._told(self.reader.news(), only)

    def _told(self, reading: Reading, only) -> list[str]:
        lines = []
        for one in reading.observations:
            value = "" if one.name == "clock.ahead" else f" {one.value:.15g} {one.unit}".rstrip()
            if not only or {one.device, one.kind} & set(only):
                text = re.sub(r"^(NVML: .*) at [\d.]+", r"\1 at some time", one.text)
                lines.append(f"{one.device or 'node'} {one.name}{value}" + f" ({text})" * bool(text))
        for title, found in (("aliases", reading.aliases), ("unreadable", reading.unreadable)):
            lines += [f"{title}: {name}: {value}" for name, value in found.items() if not only or title in only]
        return lines


class Faults(Player):
    """What is asked for with --inject and --scenario, on eight ranks and three nodes."""

    def line_plan(self, text):
        return self._told(schedule(parse(text), 8, ["n0", "n1", "n2"], 0))

    def do_scenario(self, name):
        found = read_scenario(self.folder / name)
        planned = schedule(found.specs, 8, ["n0", "n1", "n2"], found.seed or 0)
        return [f"seed {found.seed}", *self._told(planned)]

    def _told(self, faults: list[Fault]) -> list[str]:
        usual = asdict(Fault(0, ""))
        given = [{key: value for key, value in asdict(fault).items() if value != usual[key]} for fault in faults]
        said = [" ".join(f"{key}={value}" for key, value in each.items()) for each in given]
        return [f"{fault}: {values}" for fault, values in zip(faults, said, strict=True)]


class Judgements(Player):
    """The parts of the control plane's judgement, each by itself."""

    def __init__(self, folder):
        super().__init__(folder)
        self.past, self.views, self.held = [], {}, {}

    def do_error(self, message, *kinds):
        """Show the verdict on an exception of these classes, its own first."""
        return [_judged(verdict.of_error(kinds, str(message)))]

    def do_exit(self, *codes):
        return [_judged(verdict.of_exit(code)) for code in codes]

    def do_silence(self, seconds, state):
        return [verdict.of_silence(seconds, state).reason]

    def do_weigh(self, at, rank, step, message, *kinds, kept=True):
        """Show the verdict on an exception after those before, and record it unless it is not ``kept``."""
        found = verdict.of_error(kinds, message)
        weighed = history.weigh(self.past, at, rank, step, found)
        if kept:
            history.record(self.past, at, rank, step, weighed)
        return [f"{weighed.action}: {weighed.reason}"]

    def do_timeouts(self, step_s=None, **changes):
        """Show the timeouts that follow from these, and from the time of a step."""
        found = replace(Timeouts(), **changes).check().calibrated(step_s)
        return [f"stall_s={found.stall_s:g} drain_s={found.drain_s:g} beat_s={found.beat_s:g}"]

    def do_views(self):
        """Nothing is known of any worker."""
        self.views = {}

    def do_view(self, worker, doing="compute", since_s=0.0, step_s=0.1, beat_s=0.0, age_s=0.0, at_step_s=0.0, **more):
        """A worker's heartbeat was ``beat_s`` old when its agent sent it on, which is ``age_s`` ago."""
        beat = Beat(beat_s, 0, 5, doing, since_s, "here", step_s, 0, at_step_s=at_step_s)
        self.views[worker] = WorkerView(beat, age_s, **more)

    def do_look(self):
        """Show who is found to delay the others, and whether all stand still."""
        limits, lines = Timeouts(), []
        for find in (liveness.stalled, liveness.at_a_standstill, liveness.endless):
            for one in find(self.views, limits):
                seconds = f"for {one.since_s:g} s, limit {one.limit_s:g} s"
                lines.append(f"{find.__name__}: {one.worker} in {one.where} {seconds}")
        return lines or ["nobody"]

    def do_agents(self, now, **heard):
        """Show the nodes whose agents are lost: ``n0=9.9`` was heard of last at second 9.9."""
        return [f"{node} silent for {seconds:g} s" for node, seconds in liveness.lost_agents(now, heard, Timeouts())]

    def do_holdings(self):
        """Nobody holds a snapshot."""
        self.held = {}

    def do_hold(self, rank, own, **copies):
        """The worker of this rank holds these steps: its own, and copies (``of0=[5]``: of rank 0)."""
        self.held[rank] = Holdings(own, {int(key.removeprefix("of")): steps for key, steps in copies.items()})

    def do_choose(self, *groups, complete=(), spoiled=()):
        """Show the sources of ranks in these groups, whose members hold the same part of the model."""
        peers = {rank: group for group in groups for rank in group}
        step, sources, why = repairs.choose(sorted(peers), self.held, peers, spoiled, complete)
        pairs = [f"{rank}: owned from {one.owned}, replicated from {one.replicated}" for rank, one in sources.items()]
        return [why or f"step {step}", *pairs]

    def do_nodes(self):
        """There is no node."""
        self.agents = []

    def do_node(self, seats, standbys=0, devices=0, unusable=(), **changes):
        """A node joins, some of whose devices may be ``unusable``; ``gone`` or ``suspect`` say why it is."""
        number = len(self.agents)
        joined = AgentJoined(f"n{number}", number, "host", seats, standbys, devices=devices)
        self.agents.append(Agent(joined, 0.0, seats, unusable=dict.fromkeys(unusable, "broken"), **changes))

    def do_place(self):
        """Show where four ranks of a restart go."""
        found = place_ranks(self.agents, 4)
        return ["too little room" if found is None else " ".join(f"{node}={ranks}" for node, ranks in found.items())]


def _judged(found: verdict.Verdict) -> str:
    marks = [name for name in ("device_unusable", "node_suspect") if getattr(found, name)]
    return f"{', '.join([found.category, found.action, *marks])}: {found.reason}"


class Groups(Player):
    """What ranks report of their groups at the end of an epoch, and which groups are rebuilt."""

    def __init__(self, folder):
        super().__init__(folder)
        self.reports = {}

    def do_rank(self, rank, *groups, ranks=(0, 1), used=True, in_flight=False, collectives=3, sent=None, received=None):
        """A rank reports these groups, all with the same values; ``sent``, ``received``: rank -> messages."""
        counts = [{int(other): number for other, number in (one or {}).items()} for one in (sent, received)]
        made = [GroupReport(name, list(ranks), used, in_flight, collectives, *counts) for name in groups]
        self.reports.setdefault(rank, []).extend(made)

    def do_plan(self, *replaced):
        """Show what becomes of each group if these ranks have been replaced; the next reports begin anew."""
        found, self.reports = repairs.plan_rebuild(self.reports, set(replaced)), {}
        return [
            f"{what}: {name} ({found.reasons[name] or 'nothing speaks against it'})"
            for what in ("keep", "rebuild", "defer")
            for name in getattr(found, what)
        ] or ["no groups"]


PLAYERS = {
    "judgement": Judgements,
    "cause": Errors,
    "health": Health,
    "readings": Readings,
    "faults": Faults,
    "groups": Groups,
}
