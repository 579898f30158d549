"""Conversations: text files in which commands to a decision code without I/O stand beside all that it decides.

A file holds blocks that are separated by blank lines: lines with a command each, ``----``, and the expected output. A
line that begins with ``#`` is a comment. The form is that of the tests of etcd's raft library.
"""

import contextlib
import io
import json
import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any
from unittest import mock

from control_world import LIMITS, World
from histories import START
from quorum_world import World as Quorums

from ft import cli
from ft.base.errors import UserError
from ft.base.step_clock import COMPUTE
from ft.faults.health import rules
from ft.job import messages as m
from ft.job.control.sidecar import status_values
from ft.job.control.stragglers import WINDOW
from ft.job.parts import Holdings
from ft.job.quorum import NoQuorum, Report
from ft.job.quorum.decide import missing
from ft.job.quorum.server import parse_options
from ft.net.codec import BadMessage, from_json, to_json
from ft.platform.health import EVENT, Observation, Reading

# Words are separated by blanks, except inside of JSON's quotes, lists and objects.
_WORDS = re.compile(r'(?:"(?:[^"\\]|\\.)*"|\[[^\]]*\]|\{(?:[^{}]|\{[^{}]*\})*\}|\S)+')
_NAMED = re.compile(r"([\w.-]+)=(.+)", re.DOTALL)
# Before Python 3.12, argparse quotes the values that can be chosen.
_CHOICES = re.compile(r"\(choose from .*\)")
ROOT = Path(__file__).parents[1] / "pure" / "conversations"


def replay(text: str, player) -> str:
    """Return the text with the output that its commands lead to."""
    blocks = []
    for block in text.strip().split("\n\n"):
        asked = block.split("\n----")[0].splitlines()
        answers = [
            line for command in asked if not command.startswith("#") for line in player.do(command) if line.strip()
        ]
        is_comment = all(line.startswith("#") for line in asked)
        blocks.append("\n".join(asked if is_comment else [*asked, "----", *(answers or ["(nothing)"])]))
    return "\n\n".join(blocks) + "\n"


class Player:
    """Carries out the commands of a conversation: ``do_<command>(*words, **values)`` yields lines of output.

    Attributes:
        folder: a folder of its own, which commands and output call RUN.
        now: seconds since ``START``, at which commands of ``ft`` are run.
        plays: name of the attribute whose methods are commands, too; what they return is not shown.
    """

    plays = ""

    def __init__(self, folder: Path):
        self.folder, self.now = folder, 0.0

    def do(self, command: str) -> Iterator[str]:
        """Carry out ``name word ... key=value ...``; words and values are JSON, and text where they are not.

        A player's ``line_<command>(text)`` is given all that follows the name as it stands. An error of the input is
        shown as the user sees it.

        ``ft ...`` is the command of that name, ``file NAME TEXT`` adds a line to a file in the folder, and
        ``repeat 9 ...`` carries out a command for {I} = 0 to 8.
        """
        if command.startswith("repeat "):
            _, number, command = command.split(" ", 2)
            return [line for i in range(int(number)) for line in self.do(command.replace("{I}", str(i)))]
        if command.startswith("ft "):
            return self.ft(shlex.split(command)[1:])
        try:
            lines = self._carry_out(command)
        except UserError as error:
            lines = str(error).splitlines()
        lines = [line.replace(str(self.folder), "RUN") for line in lines]
        return [_CHOICES.sub(lambda found: found[0].replace("'", ""), line) for line in lines]

    def _carry_out(self, command: str) -> Iterator[str]:
        name, *words = _WORDS.findall(command)
        method = name.replace("-", "_")
        if raw := getattr(self, f"line_{method}", None):
            return raw(command.partition(" ")[2]) or []
        named = [_NAMED.fullmatch(word) for word in words]
        values = {match[1]: _value(match[2]) for match in named if match}
        given = [_value(word) for word, match in zip(words, named, strict=True) if not match]
        own = getattr(self, f"do_{method}", None)
        found = (own or getattr(getattr(self, self.plays), method))(*given, **values)
        return self.outcome() if found is None or own is None else list(found)

    def outcome(self) -> list[str]:
        """Return what is shown of a command that returns nothing."""
        return []

    def line_file(self, text):
        name, _, line = text.partition(" ")
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(line.replace("RUN", str(self.folder)) + "\n")

    def do_binary(self, name):
        """A file that is no text."""
        (self.folder / name).write_bytes(b"\xff\xfe\x00")

    def do_at(self, seconds):
        """The commands of ``ft`` that follow are run so many seconds after ``START``."""
        self.now = seconds

    def ft(self, words: list[str]) -> list[str]:
        """Return what a command of ``ft`` prints, and its exit code if that is not 0; JSON as a line for each entry."""
        out, err = io.StringIO(), io.StringIO()
        at = mock.patch.object(time, "time", lambda: START + self.now)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), at:
            code = cli.main([word.replace("RUN", str(self.folder)) for word in words])
        text = "\n".join(entries(json.loads(out.getvalue()))) if "--json" in words and code < 2 else out.getvalue()
        lines = (text + err.getvalue()).replace(str(self.folder), "RUN").splitlines()
        return [*lines, *([f"exit code {code}"] if code else [])]


def entries(values) -> Iterator[str]:
    """Yield a line for each entry of JSON objects, without what is empty."""
    for each in values if isinstance(values, list) else [values]:
        yield from (f"{key}: {json.dumps(value)}" for key, value in _filled(each).items())


def _filled(value):
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each not in (None, "", [], {})}
    if isinstance(value, list):
        return [_filled(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def changed(value) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each field of a dataclass that has not its default value."""
    for field in fields(value):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if getattr(value, field.name) != default:
            yield field.name, getattr(value, field.name)


def shown(value) -> str:
    """Return ``name=value ...`` for the fields of a dataclass that have not their default value."""
    return " ".join(f"{name}={each}" for name, each in changed(value))


def _value(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parts(values: dict) -> dict:
    """Return ``{"r2": {"doing": "wait"}}`` for ``{"r2.doing": "wait"}``."""
    parts: dict = {}
    for key, value in values.items():
        head, _, tail = key.partition(".")
        parts.setdefault(head, {})[tail] = value
    return parts


# --- the control plane ------------------------------------------------------------------------------------------------


class Recorded(World):
    """A world that keeps what was decided as lines, each with the seconds since the command."""

    def __init__(self, **options):
        super().__init__(**options)
        self.lines, self.since = [], self.now

    def _decide(self, report):
        before = len(self.decisions)
        made = super()._decide(report)
        for decision in self.decisions[before:]:
            at = f"after {self.now - self.since:g} s: " if self.now > self.since else ""
            self.lines.append(at + _on_a_line(decision.reason))
            events = ", ".join(note.name for note in decision.events)
            self.lines += [f"  events: {events}"] if events else []
            self.lines += [f"  -> {_told(order, self.lines)}" for order in decision.orders]
        return made


def _told(order, lines: list[str]) -> str:
    """Return an order as one line, without fields that have their default value and sentences that stand above it."""
    said = []
    for name, value in changed(order):
        if name in ("reason", "why", "message") and _on_a_line(value) in "".join(lines):
            continue
        if name == "seats":
            if isinstance(order, m.Inspect):
                continue
            value = " ".join(f"{rank}={seat.worker}/{seat.local_rank}" for rank, seat in value.items())
        elif name == "sources":
            value = " ".join(f"{rank}<-{_source(one)}" for rank, one in value.items())
        elif name == "rebuilt":
            value = " ".join(f"{rank}<-{one.previous}|{one.following}" for rank, one in value.items())
        said.append(f"{name}=[{value}]" if isinstance(value, str) else f"{name}={value}")
    return _on_a_line(" ".join([type(order).__name__, *said]))


def _source(one) -> str:
    if one.whose is None:
        return f"{one.owned}" + f"+{one.replicated}" * (one.replicated != one.owned)
    return f"{one.owned}+{one.replicated}:{one.whose}"


def _on_a_line(text: str) -> str:
    return text.replace("\n", " /")


class Run(Player):
    """The control plane's side of a run; the commands are what its agents and workers do."""

    plays = "world"
    world: Recorded

    def outcome(self) -> list[str]:
        """Return what was decided since the last command."""
        found, self.world.lines, self.world.since = self.world.lines, [], self.world.now
        return found

    def do_begin(self, **options):
        """Agents have joined; no worker is started. ``options``: those of :class:`World`."""
        self.world, self.held = Recorded(**options), {}
        self.world.join()

    def do_new(self, **options):
        """A run whose agents have yet to join."""
        self.world, self.held = Recorded(**options), {}

    def do_run(self, step=5, **options):
        """A run that trains: what was decided until then is not shown."""
        self.world, self.held = Recorded(**options), {}
        self.world.run(step)
        self._last_orders()
        self.outcome()
        return []

    def do_workers(self, **how):
        """The agents start the workers of a fresh run, which are ready (or not: ``ready=false``)."""
        self.orders = self.world.start_workers(**how)

    def do_train(self, step=5):
        """The workers train in the epoch that was opened last."""
        self.world.begin([order for order in self.world.orders if isinstance(order, m.Open)][-1:], step)

    def do_standbys(self):
        """The standbys that the last answer ordered are started and are ready."""
        for name in self.world.start_spawned(self._last_orders()):
            self.world.ready(name)

    def do_spawned(self):
        """The workers that the last answer ordered are started and not ready yet."""
        self.world.start_spawned(self._last_orders())

    def _last_orders(self):
        """Return the orders to start workers that have come since they were last obeyed."""
        seen = getattr(self.world, "obeyed", 0)
        self.world.obeyed = len(self.world.orders)
        return self.world.orders[seen:]

    def do_start(self, node, rank=None):
        self.world.start_worker(node, rank)

    def do_ready(self, *names):
        for name in names:
            self.world.ready(name)

    def do_kill(self, *ranks, code=-9):
        for rank in ranks:
            self.world.kill(rank, code)

    def do_hold(self, rank, own, **copies):
        """From now on the worker of this rank holds these steps: its own, and copies (``of0=[5]``: of rank 0)."""
        self.held[rank] = Holdings(own, {int(key.removeprefix("of")): steps for key, steps in copies.items()})

    def do_release(self, *ranks, **how):
        self.world.release(*ranks, holdings=self.held, **how)

    def do_repair(self, *ranks, **changes):
        self.world.repair(*ranks, **_parts(changes))

    def do_recover(self, step=5):
        """All workers do what an opened epoch asks of them, up to training; only the end is shown."""
        self.world.recover(step)
        return self.outcome()[-3:]

    def do_beat(self, step=5, **changes):
        self.world.beat(step, **_parts(changes))

    def do_wait(self, seconds, hear=True):
        """Time passes: seconds, or a limit by its name (``drain_s+1``); ``hear``: the agents that send heartbeats."""
        terms = str(seconds).split("+")
        length = sum(getattr(LIMITS, term) if term in vars(LIMITS) else float(term) for term in terms)
        self.world.wait(length, beats=hear.split(",") if isinstance(hear, str) else hear)

    def do_pause(self, seconds):
        """The control plane does not run for so long."""
        self.world.now += seconds

    def do_stacks(self, *causes, waiting=()):
        """The stack dumps that were asked for are read. ``causes``: ``RANK:KIND``; ``waiting``: ranks that wait."""
        pairs = [cause.split(":") for cause in causes]
        self.world.inspected(*(((int(rank),), kind) for rank, kind in pairs), waiting=waiting)

    def do_say(self, kind, **values):
        """A report by its name and fields."""
        self.world.say(m.decode(json.dumps({"kind": kind, **values})))

    def do_observed(self, event, **detail):
        self.world.say(m.Observed(event, detail))

    def do_done(self, *ranks, step=12, **how):
        for rank in ranks:
            self.world.say(m.WorkerDone(self.world.worker(rank), self.world.state.epoch, step, **how))

    def do_suspects(self, *ranks, group="world", message="Connection closed by peer"):
        for rank in ranks:
            self.world.say(m.WorkerSuspects(self.world.worker(rank), self.world.state.epoch, group, message))

    def do_silent(self, rank, seconds, state):
        self.world.say(
            m.WorkerSilent(self.world.worker(rank), self.world.node_of[self.world.worker(rank)], seconds, state)
        )

    def do_stages(self, lost="middle"):
        """Every rank is a pipeline stage of its own with two blocks, which CheckFree can rebuild."""
        for rank in self.world.state.seats:
            place = {"pp": rank, "tp": 0, "dp": 0, "cp": 0, "blocks": 2}
            self.world.say(m.Observed("layout", {"places": {str(rank): place}, "checkfree": lost}))

    def do_join(self, *indices, paths=None, address=None, **about):
        """Agents of these nodes join. ``paths``, ``address``, ``about``: what they say of themselves (AgentJoined)."""
        about = {
            "torch": "2.13.0",
            "python": "3.11.7",
            "--nnodes": "2",
            **{name: str(is_) for name, is_ in about.items()},
        }
        interfaces = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "192.168.9.2"}
        for i in indices:
            told = {"about": about, "interfaces": interfaces, "machine": f"host{i}", "paths": paths or {}}
            host, address = f"10.0.0.{i}", address or f"10.0.0.{i}:4000"
            self.world.say(m.AgentJoined(f"n{i}", i, host, 2, 0, rendezvous_address=address, **told))
            address = None

    def do_finding(self, name, node="n0", device="gpu7", index=None, acts=True, lacks="", **changes):
        """The node reports the finding that an event of this name makes, without the field that it ``lacks``."""
        seen = Observation(node, device, name, 1, "", 50.0, EVENT, "as the kernel log says")
        (found,) = rules(None, Reading(node, 50.0, (seen,)))
        values = {
            **asdict(found),
            "index": index,
            "acts": acts,
            "node": node,
            "wall": 50.0,
            "monotonic": 5.0,
            **changes,
        }
        self.do_observed("health_found", **{k: v for k, v in values.items() if k not in ("when", lacks)})

    def do_pace(self, rank, ratio=2.0, step=50, is_late=True, **changes):
        """The worker of a rank is found to be slower than the others, or as fast again (``is_late=false``)."""
        values = {"worker": self.world.worker(rank), "epoch": self.world.state.epoch, **changes}
        self.world.say(
            m.PaceJudged(
                **values,
                rank=rank,
                step=step,
                is_late=is_late,
                ratio=ratio,
                own_s=0.1 * ratio,
                usual_s=0.1,
                cause=COMPUTE,
                steps=WINDOW,
            )
        )

    def do_show(self, *path):
        """Show a field of the state, or of one of its parts: ``show agents n0 unusable``."""
        found = self.world.state
        for name in path:
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        return [f"{' '.join(path)}: {json.dumps(to_json(found))}"]

    def do_status(self, key):
        """Show what ``ft status`` says under this key."""
        return [f"status {key}: {json.dumps(status_values(self.world.state)[key])}"]

    def do_event(self, name, *keys):
        """Show the events of this name so far, or these of their values."""
        found = self.world.events(name)
        return [json.dumps({key: value for key, value in one.items() if not keys or key in keys}) for one in found]

    def do_state(self):
        """Show the phase, the epoch, and who holds which logical rank."""
        state = self.world.state
        seats = " ".join(f"{rank}={name}" for rank, name in sorted(state.seats.items()))
        return [f"{state.phase}, epoch {state.epoch}, restarts {state.restarts}, seats {seats}"]


# --- the quorum server ------------------------------------------------------------------------------------------------


class Quorum(Player):
    """The quorum server; the commands are what its replicas do.

    ``aside``: a replica saves or evaluates; ``repairs``: it replaces a worker of its own; ``lose``: its connection
    breaks; ``arriving``: its processes have been started anew.
    """

    plays = "world"
    world: Quorums

    def outcome(self) -> list[str]:
        """Return what the server decides now."""
        return self._said(self.world.decide())

    def do_replicas(self, number, **options):
        """A server for so many replicas, none of which has said hello."""
        self.world, self.quorums, self.told = Quorums(number, **options), {}, 0
        return []

    def do_successor(self, **options):
        """A new server takes over from one that has died; it knows nothing but what replicas tell it."""
        given, number = dict(self.world.given), self.world.options.replicas
        self.world, self.told = Quorums(number, term=1, **options), 0
        self.world.given = given
        return []

    def do_start(self, step_s=0.1):
        """All replicas come, and report that they are to do step 0."""
        for replica in range(self.world.options.replicas):
            self.world.hello(replica)
            decision = self.world.report(replica, 0, 0, step_s=step_s)
        return self._said(decision)

    def do_hello(self, replica, life=0, knows=None, **how):
        """A replica connects; ``knows``: number of its last quorum, by default the last that it was given."""
        last = self.quorums[knows] if knows is not None else self.world.given.get((replica, life))
        try:
            self.world.hello(replica, life, last=last, **how)
        except NoQuorum as error:
            return [f"refused: {error}"]

    def do_missing(self):
        """Show whom a quorum waits for."""
        return [f"replica {replica} {why}" for replica, why in missing(self.world.state, self.world.now).items()]

    def do_replica(self, number):
        """Show where the server has a replica, and for how long it is left out."""
        one = self.world.state.of(number)
        return [f"{one.phase}, ban of {one.ban.length_s:.1f} s"]

    def do_unanswered(self):
        return [f"unanswered: {self.world.state.pending()}"]

    def line_message(self, text):
        """Show what is read of a report, as it comes from the network."""
        try:
            return [str(from_json(Report, json.loads(text)))]
        except BadMessage as error:
            return [f"refused: {error}"]

    def line_options(self, text):
        """Show the options of a server that is started with these."""
        return [shown(parse_options(text).options)]

    def do_report(self, replica, next_step=0, lineage=-1, **how):
        return self._said(self.world.report(replica, next_step, lineage, **how))

    def do_commit(self, *replicas, **how):
        """These replicas have committed the step of the last quorum, one after the other."""
        return [line for one in replicas for line in self._said(self.world.commits(self._of(one), one, **how))]

    def do_retry(self, replica, *suspects, **how):
        """The step failed in this replica, which could not reach ``suspects``; it has the state from before."""
        return self._said(self.world.retries(self._of(replica), replica, *suspects, **how))

    def _of(self, replica):
        return self.world.given[replica, self.world.state.of(replica).life]

    def do_wait(self, seconds, beating=True):
        """Time passes; the replicas send heartbeats, or none (``beating=false``)."""
        return self._said(self.world.wait(seconds, beating))

    def _said(self, decision) -> list[str]:
        """Return the decision and the events since the last one as text; nothing if nobody has reported."""
        events = ", ".join(note.name for note in self.world.notes[self.told :])
        self.told = len(self.world.notes)
        return [*_decided(decision, self.quorums), *([f"  events: {events}"] if events else [])]


def _decided(decision, quorums) -> list[str]:
    quorum = decision.quorum
    if quorum is None:
        until = "" if decision.until is None else f" until {decision.until:g} s"
        head = f"refused: replica {_numbers(decision.refused)}" if decision.refused else f"waits{until}"
        return (
            [] if decision.reason == "nobody has reported" else [f"{head}: {decision.reason.removeprefix('waiting: ')}"]
        )
    quorums[quorum.number] = quorum
    what = "finished" if quorum.finished else "load" if quorum.load else f"step {quorum.step}"
    lives = "".join(f", life {life} of {one}" for one, life in sorted(quorum.lives.items()) if life)
    behind = f", behind {_numbers(quorum.behind)}" if quorum.behind else ""
    repeated = " (repeated)" if decision.is_repeated else ""
    head = f"quorum {quorum.number}{repeated}: {what}, lineage {quorum.lineage}, healthy {_numbers(quorum.healthy)}"
    return [f"{head}{behind}{lives}; to {_numbers(decision.to)}", f"  {quorum.reason}"]


def _numbers(found) -> str:
    return " ".join(map(str, found)) or "nobody"
