"""Collect the errors of a run from its folder, from which the first cause of a crash follows, and put it into words.

The journal has the exceptions that workers reported, with their tracebacks, and how processes ended. The events have
what was only observed: hangs, lost nodes. The logs have the tracebacks of scripts that take no part in recoveries, and
the stacks of fatal signals. Their formats are those of Python, of ``faulthandler``, of C++'s terminate, of torch (every
line begins with "[rank3]: ") and of this project's own "error: ... fix: ...". The text is that of ``ft diagnose crash``
and of the end of a failed ``ft run``.
"""

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ft.base import events
from ft.base.events import Event, named
from ft.faults import first_cause as causes
from ft.faults.first_cause import CrashError, EqualErrors, FirstCause, Frame, Raised
from ft.record import run
from ft.show.text import count, shortened, spans

_RANK = re.compile(r"^\[rank\d+\]: ?")
_HEAD = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$')
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: ?(?P<message>.*))?$")
_FATAL = "Fatal Python error: "
_STACK = re.compile(r"^(Current thread|Thread) 0x.*\(most recent call first\):$")
_THROWN = re.compile(r"^terminate called after throwing an instance of '(?P<kind>.+)'$")
_WHAT = re.compile(r"^\s*what\(\):\s+(?P<message>.*)$")
_REFUSED = re.compile(r"^(?:\S+: )?error: (?P<message>.*)$")
_WARNING = re.compile(r"\S.*:\d+: \w*Warning: |\[?W\d{4} ")
_MOST_LINES = 80


@dataclass(frozen=True)
class LastError:
    """What the end of a log says.

    Attributes:
        chain: the exceptions, the original one first; empty for a stack without exception.
        is_last: whether nothing but warnings follows in the log.
    """

    chain: tuple[Raised, ...]
    text: str
    is_last: bool


def parse(text: str) -> LastError | None:
    """Return the last traceback, stack or refusal in a text; None if there is none."""
    raw = text.splitlines()
    lines = [_RANK.sub("", line) for line in raw]
    begins = [at for at, line in enumerate(lines) if line == _HEAD]
    others = [at for at, line in enumerate(lines) if line.startswith(_FATAL) or _THROWN.match(line)]
    if begins and (not others or begins[-1] > others[-1]):
        return _of_exception(lines, _start_of_chain(lines, begins))
    if others:
        # Python's fault handler writes a stack after C++ has named the exception, so both belong together.
        start = others[-2] if len(others) > 1 and _THROWN.match(lines[others[-2]]) else others[-1]
        before = _of_exception(lines[:start], _start_of_chain(lines, begins)) if begins else None
        return _of_abort(lines, start) if before is None or not before.is_last else before
    refused = [at for at, line in enumerate(lines) if _REFUSED.match(line)]
    return _of_refusal(lines, refused[-1]) if refused else None


def parse_trace(trace: str) -> tuple[Raised, ...]:
    """Return the exceptions of one traceback, the original one first; empty if the text is none."""
    found = parse(trace)
    return found.chain if found is not None else ()


def _start_of_chain(lines: Sequence[str], begins: Sequence[int]) -> int:
    """Return the line at which the last traceback begins, with those that it is chained to."""
    place = len(begins) - 1
    while place > 0:
        between = [line for line in lines[begins[place - 1] : begins[place]] if line.strip()]
        if not between or between[-1] not in _CHAINED:
            break
        place -= 1
    return begins[place]


def _of_exception(lines: Sequence[str], start: int) -> LastError:
    chain: list[Raised] = []
    at = start
    while True:
        raised, at = _one_exception(lines, at)
        chain.append(raised)
        following = next((i for i in range(at, len(lines)) if lines[i].strip()), len(lines))
        if following >= len(lines) or lines[following] not in _CHAINED:
            break
        at = next((i for i in range(following, len(lines)) if lines[i] == _HEAD), len(lines))
        if at >= len(lines):
            break
    return LastError(tuple(chain), _shortened(lines[start:at]), _is_last(lines, at))


def _one_exception(lines: Sequence[str], start: int) -> tuple[Raised, int]:
    """Return the exception whose traceback begins at line ``start``, and the line after it."""
    at, frames = start + 1, []
    while at < len(lines) and lines[at].startswith("  "):
        if match := _FRAME.match(lines[at]):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
        at += 1
    match = _EXCEPTION.match(lines[at]) if at < len(lines) else None
    if match is None:
        return Raised(("an exception",), "", tuple(frames)), at
    message = [match["message"] or ""]
    at += 1
    while at < len(lines) and lines[at].startswith("  "):
        message.append(lines[at])
        at += 1
    kind = match["kind"].rpartition(".")[2]
    return Raised((kind,), "\n".join(message).strip(), tuple(frames)), at


def _of_abort(lines: Sequence[str], start: int) -> LastError:
    """Return the stack that Python's fault handler wrote, with the C++ exception before it if there is one."""
    thrown, message = _THROWN.match(lines[start]), ""
    at = start + 1
    if thrown is not None and at < len(lines) and (what := _WHAT.match(lines[at])):
        message, at = what["message"], at + 1
    frames, end, in_first = [], at, True
    for place in range(at, len(lines)):
        line = lines[place]
        if match := _FRAME.match(line):
            if in_first:
                frames.append(Frame(match["file"], int(match["line"]), match["name"]))
        elif _STACK.match(line):
            in_first = not frames
        elif line.strip() and not line.startswith((_FATAL, "Extension modules:", "  ")):
            break
        end = place + 1
    chain = (Raised((thrown["kind"],), message, tuple(reversed(frames))),) if thrown is not None else ()
    return LastError(chain, _shortened(_first_stack(lines[start:end])), _is_last(lines, end))


def _first_stack(lines: Sequence[str]) -> list[str]:
    """Return the lines up to the end of the first thread's stack, which is that of the thread that failed."""
    stacks = [at for at, line in enumerate(lines) if _STACK.match(line)]
    current = next((at for at in stacks if lines[at].startswith("Current")), stacks[0] if stacks else None)
    if current is None:
        return list(lines)
    end = next((at for at in range(current + 1, len(lines)) if not lines[at].startswith("  ")), len(lines))
    return [*lines[: stacks[0]], *lines[current:end]]


def _of_refusal(lines: Sequence[str], start: int) -> LastError:
    end = start + 1
    while end < len(lines) and lines[end].startswith("  "):
        end += 1
    message = _REFUSED.match(lines[start])["message"]
    said = "\n".join([message, *lines[start + 1 : end]])
    return LastError((Raised(("UserError",), said),), "", _is_last(lines, end))


def _is_last(lines: Sequence[str], end: int) -> bool:
    return not any(line.strip() and not line.startswith("  ") and not _WARNING.match(line) for line in lines[end:])


def _shortened(lines: Sequence[str]) -> str:
    """Return the lines as one text; of a very long stack, its beginning and its end."""
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    if len(kept) > _MOST_LINES:
        half = _MOST_LINES // 2
        kept = [*kept[:half], f"  ... {len(kept) - 2 * half} lines left out ...", *kept[-half:]]
    return "\n".join(kept)


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
    for entry in run.entries(folder / run.JOURNAL, _MARKS):
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
    chain = parse_trace(trace)
    frames = chain[-1].frames if chain else ()
    chain = (*chain[:-1], Raised(kinds, message, frames))
    place = {"epoch": report.get("epoch"), "step": report.get("step")}
    return CrashError(worker.name, worker.node, worker.rank, chain, trace, when=at, **place)


def _of_workers(folder: Path, workers: Mapping[str, _Worker]) -> Iterator[CrashError]:
    for worker in workers.values():
        yield from worker.failures
        written = parse(_end_of(folder / "logs" / f"{worker.name}.log"))
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
        written, node = parse(_end_of(path)), path.name.removesuffix(run.AGENT_LOG)
        if written is not None:
            when = path.stat().st_mtime
            yield CrashError(f"agent of {node}", node, None, written.chain, written.text, when=when)


def _is_reported(written: LastError, worker: _Worker) -> bool:
    """Return whether the worker has reported the exception in its log, so that the journal has it."""
    return any(
        written.chain and failure.chain and written.chain[-1].message[:200] == failure.chain[-1].message[:200]
        for failure in worker.failures
    )


def _ended(worker: _Worker, code: int, written: LastError | None) -> CrashError:
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


_WIDTH = 200
_ADVICE = {
    causes.MEMORY: "use a smaller micro-batch, recompute activations, or raise a parallel size; see ft check",
    causes.HARDWARE: "take the node out of use and have the device examined",
    causes.STORAGE: "make room, or repair the mount that the message names",
    causes.HANG: "look at the stack of that rank with py-spy, or raise the limit with --limits if it was only slow",
    causes.NODE: "see why the node or its network went down",
    causes.WAIT: "look for a group operation that not all ranks of its group take part in",
}
_SIGKILL_ADVICE = "if nobody sent it: the kernel's out-of-memory killer does; see dmesg on that node"


def as_text(found: FirstCause, told: Collection[str] = ()) -> str:
    """Return the first cause with its stack once, and the other errors counted.

    Args:
        told: names of workers whose stack was printed before, so that it is not printed again.
    """
    first = found.cause.first
    lines = [
        f"first cause: {_head(first)}",
        f"  {found.cause.kind} on {_where(found.cause, found.hosts)}{_when(first)}",
    ]
    if first.planned:
        lines.append(f"  it is the planned fault {first.planned} (--inject, --scenario)")
    if found.cause.kind in causes.CONSEQUENCES:
        lines.append("  no error is a cause by itself: this one came first of those that follow from others")
    if found.earlier:
        lines.append(f"  the same error had ended {count(found.earlier, 'earlier attempt')}")
    if found.quiet:
        lines.append(f"  {ranks(found.quiet)} had no error: the others may have waited for them")
    if advice := _advice(first, found.cause.kind):
        lines.append(f"  fix: {advice}")
    if first.trace and any(error.worker in told for error in found.cause.errors):
        lines.append("  its stack is above")
    elif first.trace:
        lines += [f"    {line}".rstrip() for line in first.trace.splitlines()]
    return "\n".join([*lines, *_further(found)])


def _advice(first: CrashError, kind: str) -> str:
    if kind == causes.KILLED and first.signal == signal.SIGKILL and not first.planned:
        return _SIGKILL_ADVICE
    return _ADVICE.get(kind, "")


def _head(error: CrashError) -> str:
    lines = error.head.splitlines()
    return "\n".join([shortened(lines[0], _WIDTH), *(f"  {line.rstrip()}" for line in lines[1:8])]) if lines else ""


def _where(group: EqualErrors, hosts: Mapping[str, str]) -> str:
    """Return on which ranks a group of errors was, with the worker if there was only one."""
    first, number = group.first, len(group.errors)
    if group.ranks and number == 1:
        return f"logical rank {first.rank} ({first.worker}" + (
            f" on {named(first.node, hosts)})" if first.node else ")"
        )
    if group.ranks:
        return f"{ranks(group.ranks)}; below it is that of {first.worker}" if first.trace else ranks(group.ranks)
    return first.worker or f"node {named(first.node, hosts)}"


def _when(error: CrashError) -> str:
    parts = [f"in epoch {error.epoch}"] if error.epoch is not None and error.epoch >= 0 else []
    parts += [f"after committed step {error.step}"] if error.step is not None else []
    return "".join(f", {part}" for part in parts)


def _further(found: FirstCause) -> list[str]:
    lines = []
    if found.others:
        lines.append(f"{count(len(found.others), 'other error')} may have a cause of its own:")
        lines += [
            f"  {group.kind} on {_ranks_or_names(group)}: {shortened(group.first.head, _WIDTH // 2)}"
            for group in found.others
        ]
    number = sum(len(group.errors) for group in found.consequences)
    if number:
        counted = "; ".join(
            f"{len(group.errors)} x {group.kind} ({_ranks_or_names(group)})" for group in found.consequences
        )
        verb = "error is a consequence" if number == 1 else "errors are consequences"
        lines.append(f"{number} further {verb}: {counted}")
    return lines


def _ranks_or_names(group: EqualErrors) -> str:
    return ranks(group.ranks) if group.ranks else ", ".join(error.worker or error.node for error in group.errors[:4])


def ranks(numbers: Sequence[int]) -> str:
    """Return "logical rank 3" or "logical ranks 0-3, 7"."""
    return f"logical rank{'s' if len(numbers) != 1 else ''} {spans(numbers)}"


def as_values(found: FirstCause) -> dict[str, Any]:
    """Return the first cause as JSON values."""
    return {
        "first_cause": {**_group_values(found.cause, found.hosts), "trace": found.cause.first.trace},
        "advice": _advice(found.cause.first, found.cause.kind),
        "earlier_attempts": found.earlier,
        "quiet_ranks": list(found.quiet),
        "other_causes": [_group_values(group, found.hosts) for group in found.others],
        "consequences": [_group_values(group, found.hosts) for group in found.consequences],
    }


def _group_values(group: EqualErrors, hosts: Mapping[str, str]) -> dict[str, Any]:
    first = group.first
    return {
        "class": group.kind,
        "error": first.head,
        "count": len(group.errors),
        "ranks": group.ranks,
        "workers": [error.worker for error in group.errors],
        "node": first.node,
        "host": hosts.get(first.node, ""),
        "epoch": first.epoch,
        "step": first.step,
        "when": first.when,
        "planned": first.planned,
    }
