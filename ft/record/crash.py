"""Collect the errors of a run from its folder: from the events, the control plane's journal and the workers' logs.

The journal has the exceptions that workers reported, with their tracebacks, and how processes ended. The logs have the
tracebacks of scripts that take no part in recoveries. The events have what was only observed: hangs, lost nodes.
"""

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.base import bounded_json, events
from ft.base.events import Event
from ft.faults import first_cause as causes
from ft.faults.first_cause import CrashError, FirstCause, Raised
from ft.record import run, tracebacks

_LOG_BYTES = 1 << 18
_REPORTS = ("WorkerFailed", "WorkerExited", "WorkerSuspects", "AgentLeaving")
_MARKS = tuple(f'"{name}"' for name in (*_REPORTS, "Kill", "Restart", "Stop", "Finish"))
_BY_US = (-signal.SIGKILL, -signal.SIGTERM)
_OBSERVED = {
    "hang": causes.HANG,
    "stall": causes.HANG,
    "deadline": causes.HANG,
    "node lost": causes.NODE,
    "standstill": causes.WAIT,
    "connection": causes.CONNECTION,
    "drift": causes.PROGRAM,
}
"""Signal of a detected fault -> class of the error, for faults that are neither an exception nor an exit."""


@dataclass
class _Worker:
    """What is known of one worker: its node and rank, and how it ended."""

    name: str
    node: str = ""
    rank: int | None = None
    exit: tuple[float, int] | None = None
    ended_by_us: bool = False
    failures: list[CrashError] = field(default_factory=list)


@dataclass(frozen=True)
class Crash:
    """The end of a run.

    Attributes:
        state: how the run ended, in words: as ``ft.record.run.Run.state`` says it.
        message: the control plane's message at the end, "" without one.
        errors: all errors of the run.
        found: the first cause, None if the run has finished or has no errors.
        started: whether a step was ever begun, as far as the run tells: a script of one's own may not tell.
    """

    state: str
    message: str
    errors: tuple[CrashError, ...]
    found: FirstCause | None
    started: bool


def read(folder: Path) -> Crash:
    """Return how the run in a folder ended, and the first cause if it crashed.

    Raises:
        UserError: the folder contains no run, or cannot be read.
    """
    record = run.load(folder)
    begun, stopped = record.first(events.RUN_STARTED), record.last(events.STOPPED)
    errors = tuple(errors_of(folder, record.events))
    world_size = begun.detail.get("world_size", 0) if begun is not None else 0
    has_finished = run.is_planned_end(record.state)
    found = None if has_finished else causes.first_cause(errors, world_size if isinstance(world_size, int) else 0)
    return Crash(
        record.state,
        str(stopped.detail.get("message", "")) if stopped is not None else "",
        errors,
        replace(found, hosts=events.hosts(record.events)) if found is not None else None,
        bool(record.metrics) or record.first(events.RESUMED) is not None,
    )


def errors_of(folder: Path, happened: list[Event]) -> Iterator[CrashError]:
    """Yield the errors of the run in ``folder``, whose events are ``happened``, in no particular order."""
    resumed = sorted(event.wall for event in happened if event.name == events.RESUMED)
    workers, beside = _workers(happened), []
    for entry in _entries(folder / run.JOURNAL):
        beside += _take(entry, workers)
    planned = {
        event.worker: str(event.detail.get("kind", ""))
        for event in happened
        if event.name == events.FAULT_INJECTED and event.worker
    }
    of_processes = (*_of_workers(folder, workers), *_of_agents(folder))
    for found in (*of_processes, *beside, *_observed(happened, workers)):
        attempt = len(resumed) if found.when is None else sum(at < found.when for at in resumed)
        yield replace(found, attempt=attempt, planned=planned.get(found.worker, ""))


def _workers(happened: list[Event]) -> dict[str, _Worker]:
    """Return the workers that the events name, each with the last logical rank that it had."""
    found: dict[str, _Worker] = {}
    for event in happened:
        if event.name == events.WORKER_STARTED and event.worker:
            found[event.worker] = _Worker(event.worker, event.node or "", event.rank)
        elif event.name == events.EPOCH_OPENED:
            seats = event.detail.get("seats")
            for rank, name in seats.items() if isinstance(seats, dict) else ():
                if isinstance(name, str) and name in found and str(rank).isdecimal():
                    found[name].rank = int(rank)
    return found


def _entries(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of the journal that tell of errors and of ends, without reading all of it into memory."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if any(mark in line for mark in _MARKS):
                    try:
                        entry = bounded_json.loads(line, non_finite=True)
                    except ValueError:
                        continue
                    if isinstance(entry, dict):
                        yield entry
    except FileNotFoundError:
        return


def _take(entry: Mapping[str, Any], workers: dict[str, _Worker]) -> list[CrashError]:
    """Add one entry of the journal to the workers; return the errors in it that say nothing of how a worker ended."""
    report, at = entry.get("report") or {}, float(entry.get("wall", 0.0))
    kind, found = report.get("kind"), []
    worker = workers.get(str(report.get("worker")))
    if kind == "WorkerFailed" and worker is not None:
        worker.failures.append(_failure(report, worker, at))
    elif kind == "WorkerExited" and worker is not None:
        worker.exit = at, int(report.get("code", 0))
    elif kind == "WorkerSuspects" and worker is not None:
        told = f"group {report.get('group')}: {report.get('message', '')}".splitlines()[0]
        place = {"told": told, "when": at, "epoch": report.get("epoch")}
        found = [CrashError(worker.name, worker.node, worker.rank, observed=causes.CONNECTION, **place)]
    elif kind == "AgentLeaving" and report.get("signum"):
        name = causes.verdict.signal_name(int(report["signum"]))
        node = str(report.get("node", ""))
        told = f"the agent of {node} was told to end by {name}"
        found = [CrashError(f"agent of {node}", node, observed=causes.TOLD, told=told, when=at)]
    for decision in entry.get("decisions") or ():
        for order in decision.get("orders") or ():
            _order(order, workers)
    return found


def _order(order: Mapping[str, Any], workers: dict[str, _Worker]) -> None:
    """Record whom an order ends: from then on the end of a process says nothing about it."""
    if order.get("kind") == "Kill" and order.get("worker") in workers:
        _mark(workers[order["worker"]])
    elif order.get("kind") in ("Restart", "Stop", "Finish"):
        for worker in workers.values():
            _mark(worker)


def _mark(worker: _Worker) -> None:
    if worker.exit is None:
        worker.ended_by_us = True


def _failure(report: Mapping[str, Any], worker: _Worker, at: float) -> CrashError:
    trace = str(report.get("trace", "")).rstrip()
    kinds = tuple(str(kind) for kind in report.get("kinds") or ("an exception",))
    message = str(report.get("message", ""))
    chain = tracebacks.parse_trace(trace)
    frames = chain[-1].frames if chain else ()
    chain = (*chain[:-1], Raised(kinds, message, frames))
    place = {"epoch": report.get("epoch"), "step": report.get("step")}
    return CrashError(worker.name, worker.node, worker.rank, chain, trace, when=at, **place)


def _of_workers(folder: Path, workers: Mapping[str, _Worker]) -> Iterator[CrashError]:
    for worker in workers.values():
        yield from worker.failures
        written = tracebacks.parse(_end_of(folder / "logs" / f"{worker.name}.log"))
        code = worker.exit[1] if worker.exit is not None else 0
        if worker.ended_by_us and code in (0, *_BY_US):
            code = 0
        if written is not None and (_is_reported(written, worker) or not (code or written.is_last)):
            written = None
        if written is None and (not code or worker.failures):
            if worker.ended_by_us and not worker.failures and worker.exit is not None and worker.rank is not None:
                yield CrashError(
                    worker.name, worker.node, worker.rank, signal=signal.SIGKILL, when=worker.exit[0], by_us=True
                )
            continue
        yield _ended(worker, code, written)


def _of_agents(folder: Path) -> Iterator[CrashError]:
    """Yield the exceptions that have ended agents."""
    for path in sorted((folder / "logs").glob(f"*{run.AGENT_LOG}")):
        written, node = tracebacks.parse(_end_of(path)), path.name.removesuffix(run.AGENT_LOG)
        if written is not None:
            when = path.stat().st_mtime
            yield CrashError(f"agent of {node}", node, None, written.chain, written.text, when=when)


def _is_reported(written: tracebacks.Crash, worker: _Worker) -> bool:
    """Return whether the worker has reported the exception in its log, so that the journal has it."""
    return any(
        written.chain and failure.chain and written.chain[-1].message[:200] == failure.chain[-1].message[:200]
        for failure in worker.failures
    )


def _ended(worker: _Worker, code: int, written: tracebacks.Crash | None) -> CrashError:
    """Return the error of a worker that ended with ``code``, 0 if this project ended it, with its last words."""
    return CrashError(
        worker.name,
        worker.node,
        worker.rank,
        written.chain if written is not None else (),
        written.text if written is not None else "",
        signal=-code if code < 0 else 0,
        exit_code=code if code > 0 else None,
        when=worker.exit[0] if worker.exit is not None and code else None,
        by_us=worker.ended_by_us and not code,
    )


def _observed(happened: list[Event], workers: Mapping[str, _Worker]) -> Iterator[CrashError]:
    """Yield the faults that the control plane has seen from outside, and those that the journal would have had."""
    nodes: set[tuple[str, float]] = set()
    for event in happened:
        kind = str(event.detail.get("signal", ""))
        if event.name != events.FAULT_DETECTED:
            continue
        worker = workers.get(event.worker or "", _Worker(event.worker or "", event.node or "", event.rank))
        told = str(event.detail.get("reason", "")).splitlines()
        error = CrashError(worker.name, worker.node, event.rank, when=event.wall, epoch=event.epoch, step=event.step)
        sentence = told[0] if told else kind
        if kind == "node lost":
            if (worker.node, event.wall) not in nodes:
                nodes.add((worker.node, event.wall))
                yield replace(error, observed=causes.NODE, told=sentence)
        elif kind in _OBSERVED:
            yield replace(error, observed=_OBSERVED[kind], told="\n".join(told) if kind == "drift" else sentence)
        elif not worker.failures and worker.exit is None:
            yield _from_event(error, kind, sentence)


def _from_event(error: CrashError, kind: str, sentence: str) -> CrashError:
    """Return an exception or an exit of which only the event is left, because there is no journal."""
    if kind == "exception":
        name, _, message = sentence.partition(": ")
        return replace(error, chain=(Raised((name,), message),))
    number = getattr(signal, kind, None) if kind.startswith("SIG") else None
    if isinstance(number, signal.Signals):
        return replace(error, signal=int(number))
    return replace(error, exit_code=int(kind[5:]) if kind.startswith("exit ") and kind[5:].isdecimal() else 1)


def _end_of(path: Path) -> str:
    """Return the end of a log as text, "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
