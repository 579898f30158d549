"""Runs the checks of a self-test one after another, on all nodes at once, within the given time; formats the outcome.

Node 0 says which check is next, and every node runs it in a process of its own (:func:`main`), with a deadline that
also holds when a driver hangs. The nodes meet in a store on node 0 (``ft.net.store``). The other nodes ask it again and
again instead of waiting in it, so that they also see a signal.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ft.base import bounded_json, files, token
from ft.base.errors import UserError
from ft.job.agent.environment import defaults
from ft.lab.selftest.table import CHECKS, FAIL, PASS, SKIPPED, Check, Context, Failed, Result, Skipped, together
from ft.platform import network, processes
from ft.platform.slurm import JobPlace
from ft.platform.supervisor import Supervisor
from ft.show.text import count, seconds, shortened, steer, table

FORMAT = 1
"""Version of the JSON values."""
_HEAD = ("check", "result", "time", "found")


@dataclass(frozen=True)
class SelfTestOutcome:
    """The outcome of a self-test: each check with its results on all nodes."""

    rows: Sequence[tuple[Check, Sequence[Result]]]
    nodes: Sequence[str]
    folder: str
    seconds: float

    @property
    def together(self) -> list[tuple[Check, Result]]:
        """Return each check with its result on all nodes together."""
        return [(check, together(results)) for check, results in self.rows]

    @property
    def passed(self) -> bool:
        """Return whether no check has failed."""
        return all(result.outcome != FAIL for _, result in self.together)


def as_text(outcome: SelfTestOutcome) -> str:
    """Return the table, what to do about each failure, and a summary."""
    rows = outcome.together
    cells = [
        (check.name, one.outcome, seconds(one.seconds) if one.seconds else "-", " ".join(one.text.split()))
        for check, one in rows
    ]
    lines = [table(_HEAD, cells, right=(2,)), ""]
    for check, one in rows:
        if one.outcome == FAIL:
            lines += [f"{check.name} shows: {check.shows}", f"  what to do: {one.fix}"]
    numbers = Counter(one.outcome for _, one in rows)
    kinds = ((PASS, "passed"), (FAIL, "failed"), (SKIPPED, "skipped"))
    said = ", ".join(f"{numbers[kind]} {word}" for kind, word in kinds)
    where = count(len(outcome.nodes), "node")
    return "\n".join([*lines, f"{said}; {where}, {seconds(outcome.seconds)}; logs: {outcome.folder}"])


def as_values(outcome: SelfTestOutcome) -> dict[str, Any]:
    """Return the outcome as JSON values; docs/selftest.md describes them."""
    return {
        "format": FORMAT,
        "passed": outcome.passed,
        "nodes": list(outcome.nodes),
        "seconds": round(outcome.seconds, 3),
        "folder": outcome.folder,
        "checks": [_values(*row) for row in outcome.rows],
    }


def _values(check: Check, results: Sequence[Result]) -> dict[str, Any]:
    values = {"name": check.name, "shows": check.shows, **asdict(one := together(results))}
    return {**values, "node": None, "fix": one.fix or None, "nodes": [asdict(one) for one in results]}


_ASK_S, _JOIN_S, _GRACE_S, _STORE_S = 0.1, 120.0, 20.0, 60.0
_INTERACTIVE_STEP = "4294967290"
"""Number of the job step in which Slurm runs the shell of ``salloc`` (SLURM_INTERACTIVE_STEP in slurm.h)."""


@dataclass(frozen=True)
class NodePlace:
    """This node's place among the nodes of the self-test; nodes are numbered from 0."""

    node: int = 0
    nnodes: int = 1
    host: str = "127.0.0.1"
    port: int = 0


class Nodes:
    """The other nodes, seen from one node. With one node, nothing is connected.

    Attributes:
        host: address at which the other nodes reach this one.
        names: names of the nodes, in order; on other nodes than node 0 only this one's.
        address: address of the store, "" with one node.
    """

    def __init__(self, place: NodePlace, run_dir: Path, turn: Callable[[], None]):
        self.place, self._turn = place, turn
        self.host, self.address, self.token = "127.0.0.1", "", "selftest"
        self.names = [os.uname().nodename]
        self._lost: set[int] = set()  # nodes that did not answer once are not waited for again
        self._server: Any = None
        if place.nnodes > 1:
            self._connect(run_dir)

    def _connect(self, run_dir: Path) -> None:
        from ft.net.store import StoreConnection, StoreServer  # imports torch, which one node alone does not need here

        place = self.place
        self.host = network.own_address(place.host, place.port, place.node == 0)
        if place.node == 0:
            self.token = token.make(run_dir)
            self._server = StoreServer(place.host, place.port, self.token)
            self.address = self._server.address
            self._store = StoreConnection(self.address, self.token, _STORE_S)
        else:
            self.token, self.address = token.find(run_dir, _JOIN_S), f"{place.host}:{place.port}"
            self._store = self._joined(StoreConnection)
        self._store.set(f"name/{place.node}", self.names[0])
        if place.node == 0:
            self.names = [self._await(f"name/{node}", _JOIN_S, f"node {node}") for node in range(place.nnodes)]

    def _joined(self, connection):
        deadline = time.monotonic() + _JOIN_S
        while True:
            try:
                return connection(self.address, self.token, _STORE_S)
            except ConnectionError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"node 0 does not answer at {self.address}: {error}",
                        "start ft selftest on it too, and let this node reach that port",
                    ) from error
                self._turn()

    def _await(self, key: str, limit_s: float, who: str) -> str:
        deadline = time.monotonic() + limit_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise UserError(f"{who} has not joined within {limit_s:.0f} s", "start ft selftest on every node")
            self._turn()
        return self._store.get(key).decode()

    def close(self) -> None:
        """On node 0: end the store, whose thread must not be inside torch when the process exits: it would abort."""
        if self._server is not None:
            self._server.close()

    def announce(self, number: int, name: str, limit_s: float, is_cut: bool) -> None:
        """On node 0: tell the other nodes which check is next; the name "" ends the self-test."""
        if self.address:
            self._store.set(f"check/{number}", json.dumps([name, limit_s, is_cut]))

    def next(self, number: int) -> tuple[str, float, bool] | None:
        """On another node: return what node 0 announced, or None at the end of the self-test or of node 0."""
        try:
            while not self._store.check([f"check/{number}"]):
                self._turn()
            name, limit_s, is_cut = bounded_json.loads(self._store.get(f"check/{number}"), non_finite=True)
        except ConnectionError:  # node 0 is gone
            return None
        return (name, limit_s, is_cut) if name else None

    def report(self, number: int, result: Result) -> None:
        """On another node: send the result of a check to node 0."""
        self._store.set(f"result/{number}/{self.place.node}", json.dumps(asdict(result)))

    def collect(self, number: int, deadline: float) -> list[Result]:
        """On node 0: return the results of the other nodes; a node that does not answer has failed. ``deadline``:
        monotonic time at which the nodes kill the check's processes."""
        found = []
        for node in range(1, self.place.nnodes):
            key = f"result/{number}/{node}"
            while not (is_there := self._store.check([key])) and time.monotonic() < deadline + _GRACE_S:
                if node in self._lost:
                    break
                self._turn()
            if is_there:
                self._lost.discard(node)
                found.append(Result(**bounded_json.loads(self._store.get(key), non_finite=True)))
            else:
                self._lost.add(node)
                fix = "look whether the node still runs; take it out of the job if it does not"
                found.append(Result(FAIL, "the node does not answer", fix, node=self.names[node]))
        return found


def is_alone_in(job: JobPlace | None, environment) -> bool:
    """Return whether this process is the only one in a Slurm allocation of several nodes: in its script or shell."""
    if job is None:
        return False
    shell = environment.get("SLURM_STEP_ID") == _INTERACTIVE_STEP
    return (shell or not job.in_step) and int(environment.get("SLURM_JOB_NUM_NODES", job.nnodes)) > 1


def srun(nodes: int | None, environment, words: list[str]) -> list[str]:
    """Return the command that runs ``words`` once on every node of the allocation, or on the first ``nodes``."""
    number = nodes or int(environment["SLURM_JOB_NUM_NODES"])
    how = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0", "--cpu-bind=none", "--overlap"]
    return ["srun", f"--nodes={number}", f"--ntasks={number}", *how, *words]


_RESULT = "result.json"
_CHECKS = "ft.lab.selftest.checks"
_NOT_FORESEEN = "an error that this check does not foresee: see its log, and report it"


def main() -> None:
    """Run one check, and end the process without waiting for threads that may be blocked in a driver.

    ``sys.argv[1:]`` is (the check's "module:function", the encoded :class:`~ft.lab.selftest.table.Context`).
    """
    function, text = sys.argv[1:]
    context = Context.decode(text)
    found = run_check(function, context)
    files.replace(context.scratch / _RESULT, json.dumps(asdict(found)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_check(function: str, context: Context) -> Result:
    """Call "module:function" and return its result; every exception becomes one."""
    module, _, name = function.partition(":")
    try:
        found, measured = getattr(importlib.import_module(f"{_CHECKS}.{module}"), name)(context)
        return Result(PASS, found, measured=measured)
    except Skipped as reason:
        return Result(SKIPPED, str(reason))
    except Failed as failure:
        return Result(FAIL, failure.problem, failure.fix, failure.measured)
    except UserError as error:
        return Result(FAIL, error.problem, error.fix or "")
    except Exception as error:
        traceback.print_exc()
        return Result(FAIL, f"{type(error).__name__}: {error}", _NOT_FORESEEN)


def _read(path: Path) -> Result | None:
    """Return the result in a file, None if there is no such file."""
    try:
        return Result(**bounded_json.loads(path.read_text(), non_finite=True))
    except FileNotFoundError:
        return None


_TURN_S, _PATIENCE_S = 0.1, 5.0
LOG = "check.log"
_STUCK = "a process is stuck in the kernel, as with a hung driver: look at dmesg and nvidia-smi, and reboot the node"


class Interrupted(Exception):
    """The self-test was asked to end."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Executor:
    """Starts checks one after another. Use it as a context: at its end no process is left, whatever happened."""

    def __init__(self) -> None:
        self._supervisor = Supervisor()
        self._signum: int | None = None

    def __enter__(self) -> "Executor":
        self._supervisor.open(self._on_signal)
        return self

    def __exit__(self, *_) -> None:
        self._supervisor.close()

    def turn(self, longest_s: float = _TURN_S) -> None:
        """Wait at most ``longest_s`` seconds for a process or a signal.

        Raises:
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        self._supervisor.turn(longest_s)
        if self._signum is not None:
            raise Interrupted(self._signum)

    def run(self, check: Check, context: Context, is_cut: bool) -> Result:
        """Run a check and return its result. Kill its processes when ``context.limit_s`` is over. ``is_cut``: whether
        that limit is what was left of ``--minutes`` instead of the check's own.

        Raises:
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        began, codes = time.monotonic(), []
        context.scratch.mkdir(parents=True, exist_ok=True)
        log = context.scratch / LOG
        arguments = [check.function, context.encoded()]
        environment = {**os.environ, **defaults(os.environ)}  # as the workers of a run have it
        child = self._supervisor.start("ft.lab.selftest.session", arguments, log, codes.append, environment=environment)
        while not codes and time.monotonic() - began < context.limit_s:
            self.turn()
        seconds = time.monotonic() - began
        ended = list(codes)  # what the kill adds is not the end that is judged
        is_stuck = not ended and not self._kill(child.pid)
        processes.end_descendants(_PATIENCE_S)  # this process is a subreaper, so all that is left is below it
        found = _read(context.scratch / _RESULT)
        if found is None:
            found = _without_result(ended, context, is_cut, log)
        if is_stuck:
            found = Result(FAIL, f"{found.text}; its process cannot be killed", _STUCK)
        found.seconds = round(seconds, 3)
        return found

    def _kill(self, pid: int) -> bool:
        """Kill the check's process with all below it; return whether it is gone."""
        deadline = time.monotonic() + _PATIENCE_S
        processes.kill_whole([pid])
        while time.monotonic() < deadline:
            self._supervisor.turn(_TURN_S)
            if processes.state(pid) in "ZX":
                return True
        return False

    def _on_signal(self, signum: int) -> None:
        self._signum = signum


def _without_result(codes: list[int], context: Context, is_cut: bool, log: Path) -> Result:
    """Return the result of a check whose process was killed at its deadline, or has ended without a result."""
    if codes:
        return Result(FAIL, f"its process {processes.how_it_ended(codes[0])}: {last_line(log)}", f"see {log}")
    if is_cut:
        return Result(SKIPPED, f"not done when --minutes was over, after {context.limit_s:.0f} s: give more minutes")
    return Result(
        FAIL,
        f"no answer within {context.limit_s:.0f} s",
        f"something hangs; see {log}, nvidia-smi and dmesg, then run it again with --only {context.check}",
    )


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


_RESERVE_S = 5.0
"""Seconds that are kept for ending processes and for the other nodes' answers."""


@dataclass(frozen=True)
class TestPlan:
    """What a self-test is to do. ``planted``: names of the checks whose fault is made; ``run_dir``: the folder that the
    checks may write to, which all nodes share; ``gpus``: largest number of GPUs to use on each node; None: all."""

    checks: Sequence[Check]
    planted: frozenset[str]
    seconds: float
    run_dir: Path
    gpus: int | None
    place: NodePlace


class SelfTest:
    """A self-test on this node."""

    def __init__(self, plan: TestPlan, executor: Executor):
        self._plan, self._executor = plan, executor
        self._began = time.monotonic()
        self._folder = _folder(plan)
        self._nodes = Nodes(plan.place, plan.run_dir, executor.turn)

    def lead(self) -> SelfTestOutcome:
        """Run the checks as node 0, and return the outcome of all nodes.

        Raises:
            ft.base.errors.UserError: another node did not join.
            ft.lab.selftest.session.Interrupted: SIGINT or SIGTERM has arrived.
        """
        rows = []
        for number, check in enumerate(self._plan.checks):
            _progress(f"{number + 1} of {len(self._plan.checks)}: {check.name}")
            left = self._plan.seconds - (time.monotonic() - self._began) - _RESERVE_S
            why = f"it needs about {check.needs_s:.0f} s, and {max(left, 0):.0f} s are left of --minutes"
            results = [Result(SKIPPED, f"left out for time: {why}")]
            if left >= check.needs_s:
                limit, is_cut = min(check.limit_s, left), left < check.limit_s
                deadline = time.monotonic() + limit
                self._nodes.announce(number, check.name, limit, is_cut)
                results = [self._run(check, limit, is_cut), *self._nodes.collect(number, deadline)]
            else:
                self._nodes.announce(number, SKIPPED, 0.0, True)
            rows.append((check, results))
        self._nodes.announce(len(self._plan.checks), "", 0.0, False)
        self._nodes.close()
        _progress("")
        return SelfTestOutcome(rows, self._nodes.names, str(self._folder), time.monotonic() - self._began)

    def follow(self) -> None:
        """Run the checks that node 0 announces, until it ends the self-test or is gone."""
        checks = {check.name: check for check in CHECKS}
        number = 0
        while (announced := self._nodes.next(number)) is not None:
            name, limit, is_cut = announced
            if name in checks:
                result = self._run(checks[name], limit, is_cut)
                with contextlib.suppress(ConnectionError):  # node 0 is gone: ``next`` says so
                    self._nodes.report(number, result)
            number += 1

    def _run(self, check: Check, limit_s: float, is_cut: bool) -> Result:
        nodes, place = self._nodes, self._plan.place
        context = Context(
            check=check.name,
            folder=str(self._folder / f"node-{place.node}" / check.name),
            run_dir=str(self._plan.run_dir),
            gpus=self._plan.gpus,
            limit_s=limit_s,
            planted=check.name in self._plan.planted,
            node=place.node,
            nnodes=place.nnodes,
            host=nodes.host,
            store=nodes.address,
            token=nodes.token,
        )
        result = self._executor.run(check, context, is_cut)
        result.node = nodes.names[place.node] if place.node < len(nodes.names) else nodes.names[0]
        return result


def _folder(plan: TestPlan) -> Path:
    """Return the folder for logs: the run folder, or a temporary one if that cannot be written (a check says so)."""
    folder = plan.run_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="ft-selftest-"))


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        steer(sys.stderr, "\r\x1b[K")
        print(shortened(text, 70) if text else "", end="", file=sys.stderr, flush=True)
