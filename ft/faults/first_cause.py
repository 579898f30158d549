"""Find the first cause of a crash: of many ranks' errors at once, the one that came first in the order of causes.

The order of causes is an order of classes: an exception of the program explains why the other ranks lose their
connections to this rank, and never the other way round. Clocks of several hosts differ, and the rank that fails often
ends later than the ranks that lose it; so times only decide between errors of one class.
"""

import builtins
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ft.faults import verdict
from ft.faults.verdict import DEVICE as DEVICE_CATEGORY
from ft.faults.verdict import HOST, NETWORK, TRANSIENT, USER

HARDWARE, MEMORY, PROGRAM, STORAGE = "hardware fault", "out of memory", "exception of the program", "storage fault"
DEVICE, KILLED, NODE, EXIT, HANG = "device error", "death by a signal", "lost node", "exit without a word", "hang"
TOLD = "told to end from outside"
CONNECTION, WAIT, CLOSED, ENDED = "lost connection", "wait that timed out", "closed epoch", "ended by ft run"

CAUSES = (HARDWARE, MEMORY, PROGRAM, STORAGE, DEVICE, KILLED, NODE, EXIT, HANG)
"""Classes of errors that can be the first cause, in the order of causes.

A broken device or too little memory makes programs raise exceptions of their own. A CUDA error without a word about
the hardware comes after them, because the death of a rank can cause it on the ranks that read its memory.
"""
CONSEQUENCES = (TOLD, CONNECTION, WAIT, CLOSED, ENDED)
"""Classes of errors that follow from an error elsewhere. TOLD: an agent got a signal. A lost connection is seen at
once, a wait times out later, and both are seen before this project ends the other processes.
"""
_ORDER = (*CAUSES, *CONSEQUENCES)

_SAME_FRAMES = 3
_CLOSED_KINDS = ("EpochClosed",)
_ENDED_KINDS = ("KeyboardInterrupt", "SystemExit")
_WAIT_WORDS = ("timed out", "timeout", "deadline")
_CONNECTION_WORDS = (
    *("connection closed", "connection reset", "connection refused", "broken pipe", "got 0 bytes", "remote process"),
    *("remote peer", "connection was closed", "recvvalue failed", "socket closed", "no route to host"),
)
_OF_GROUPS = ("gloo", "nccl", "store", "socket", "collective", "recv", "barrier", "watchdog", "process group")
_MEMORY_WORDS = ("out of memory", "cannot allocate memory", "outofmemory", "std::bad_alloc")


@dataclass(frozen=True)
class Frame:
    """One call of a stack trace."""

    file: str
    line: int
    name: str


@dataclass(frozen=True)
class Raised:
    """An exception as a traceback shows it.

    Attributes:
        kinds: class names of the exception and of its base classes as far as they are known, most specific first.
        frames: its stack, innermost call last.
    """

    kinds: tuple[str, ...]
    message: str
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class CrashError:
    """One error of one worker.

    Attributes:
        worker: name of the worker, or of the agent if the error is the agent's; "": unknown.
        rank: its logical rank, None for a standby.
        chain: the exceptions of the traceback, the original one first; empty for an error without exception.
        trace: the traceback or stack as it was written; "": there is none.
        signal: number of the signal that killed the process, 0 for none.
        exit_code: exit code of the process if it is not 0 and no signal killed it; None otherwise.
        observed: the class in the order of causes if the error is no exception (HANG, NODE, ...), "" otherwise.
        told: the sentence of the control plane about the error, for one that has no exception.
        when: time in seconds since 1970; None: unknown.
        step: last committed step.
        attempt: number of times that training had resumed before the error.
        by_us: whether this project has ended the process.
        planned: kind of the planned fault (``--inject``) that was carried out on this worker, "" for none.
    """

    worker: str
    node: str = ""
    rank: int | None = None
    chain: tuple[Raised, ...] = ()
    trace: str = ""
    signal: int = 0
    exit_code: int | None = None
    observed: str = ""
    told: str = ""
    when: float | None = None
    epoch: int | None = None
    step: int | None = None
    attempt: int = 0
    by_us: bool = False
    planned: str = ""

    @property
    def head(self) -> str:
        """Return the error in one line."""
        if self.chain:
            raised = _shown(self.chain)
            return f"{raised.kinds[0]}: {raised.message}".rstrip(": ")
        if self.told:
            return self.told
        if self.signal:
            return f"killed by {verdict.signal_name(self.signal)}"
        return f"exited with code {self.exit_code}"


@dataclass(frozen=True)
class EqualErrors:
    """Equal errors: of the same class and type, with the same innermost lines of the stack.

    Attributes:
        kind: the class of the errors, an entry of CAUSES or CONSEQUENCES.
    """

    kind: str
    errors: tuple[CrashError, ...]

    @property
    def first(self) -> CrashError:
        return self.errors[0]

    @property
    def ranks(self) -> list[int]:
        """Return the logical ranks that had this error, sorted."""
        return sorted({error.rank for error in self.errors if error.rank is not None})


@dataclass(frozen=True)
class FirstCause:
    """The first cause of a crash.

    Attributes:
        others: groups of other errors of the same attempt that could be causes too.
        consequences: errors of the same attempt that follow from others, one group for each class.
        earlier: number of earlier attempts that the same error had ended.
        quiet: logical ranks without any error, if the first cause is a wait or a hang; another rank may have waited
            for them.
        hosts: node -> host name, for the nodes of the run.
    """

    cause: EqualErrors
    others: tuple[EqualErrors, ...] = ()
    consequences: tuple[EqualErrors, ...] = ()
    earlier: int = 0
    quiet: tuple[int, ...] = field(default=())
    hosts: Mapping[str, str] = field(default_factory=dict)


def class_of(error: CrashError) -> str:
    """Return the class of an error, an entry of CAUSES or CONSEQUENCES."""
    if error.observed:
        return error.observed
    if error.chain:
        return class_of_exception(error.chain[0])  # what is raised while it is handled is a consequence of it
    if error.by_us:
        return ENDED
    return KILLED if error.signal else EXIT


def class_of_exception(raised: Raised) -> str:
    """Return the class of one exception."""
    kinds, said = with_bases(raised.kinds), raised.message.lower()
    if any(kind in kinds for kind in _CLOSED_KINDS):
        return CLOSED
    if any(kind in kinds for kind in _ENDED_KINDS):
        return ENDED
    found = verdict.of_error(kinds, raised.message)
    if "MemoryError" in kinds or any(word in said for word in _MEMORY_WORDS) or "OutOfMemoryError" in kinds:
        return MEMORY
    if found.category == TRANSIENT or _is_of_others(kinds, said):
        return WAIT if any(word in said for word in _WAIT_WORDS) or "TimeoutError" in kinds else CONNECTION
    if found.category in (DEVICE_CATEGORY, HOST):
        if found.node_suspect or found.device_unusable:
            return HARDWARE
        return DEVICE if found.category == DEVICE_CATEGORY else PROGRAM  # such as a process without free descriptors
    if found.category == NETWORK:
        return STORAGE
    return PROGRAM


def _is_of_others(kinds: Sequence[str], said: str) -> bool:
    """Return whether the words of an exception say that a collective or a connection failed because of others."""
    if verdict.of_error(kinds, said).category == USER:
        return False
    speaks_of_groups = any(word in said for word in _OF_GROUPS)
    return speaks_of_groups and any(word in said for word in (*_CONNECTION_WORDS, *_WAIT_WORDS))


def with_bases(kinds: Sequence[str]) -> list[str]:
    """Return the class names with those of the base classes, which a log does not show, for Python's own classes."""
    names = [kind.rpartition(".")[2] for kind in kinds]
    if len(names) == 1 and isinstance(known := getattr(builtins, names[0], None), type):
        names += [base.__name__ for base in known.__mro__[1:-1]]
    return names


def _shown(chain: Sequence[Raised]) -> Raised:
    """Return the exception of a chain by which the error is called: the last one, which says most about where the
    program was, unless it is only a consequence of the original one.
    """
    last = chain[-1]
    return last if class_of_exception(last) in CAUSES or class_of_exception(chain[0]) not in CAUSES else chain[0]


def first_cause(errors: Iterable[CrashError], world_size: int = 0) -> FirstCause | None:
    """Return the first cause of the last attempt that failed; None if there are no errors.

    If the last attempt has only consequences, the attempts before it are searched for a cause, the latest first.

    Args:
        world_size: number of logical ranks; 0: unknown.
    """
    attempts: dict[int, list[CrashError]] = {}
    for error in errors:
        attempts.setdefault(error.attempt, []).append(error)
    if not attempts:
        return None
    numbers = sorted(attempts, reverse=True)
    ranked = {number: _groups(attempts[number]) for number in numbers}
    chosen = next((number for number in numbers if ranked[number][0].kind in CAUSES), numbers[0])
    cause, *rest = ranked[chosen]
    earlier = [n for n in numbers if n < chosen and any(_same(group, cause) for group in ranked[n])]
    heard = {error.rank for error in attempts[chosen]}
    waits = cause.kind in (HANG, WAIT)
    return FirstCause(
        cause,
        tuple(group for group in rest if group.kind in CAUSES),
        tuple(_merged([group for group in rest if group.kind in CONSEQUENCES])),
        len(earlier),
        tuple(rank for rank in range(world_size) if rank not in heard) if waits else (),
    )


def _groups(errors: Iterable[CrashError]) -> list[EqualErrors]:
    """Return the groups of equal errors in the order of causes."""
    found: dict[tuple, list[CrashError]] = {}
    for error in _once_for_each_worker(errors):
        found.setdefault(_key(error), []).append(error)
    groups = [EqualErrors(class_of(equal[0]), tuple(sorted(equal, key=_age))) for equal in found.values()]
    return sorted(groups, key=_place)


def _once_for_each_worker(errors: Iterable[CrashError]) -> list[CrashError]:
    """Return for each worker the first of its errors in the order of causes: how its process ended then follows."""
    best: dict[tuple[str, int | None], CrashError] = {}
    for error in errors:
        key = (error.worker, error.rank if not error.worker else None)
        other = best.get(key)
        if other is None or (_ORDER.index(class_of(error)), _age(error)) < (_ORDER.index(class_of(other)), _age(other)):
            best[key] = error
    return list(best.values())


def _place(group: EqualErrors) -> tuple:
    """Return the sort key of a group: causes first, seated workers before standbys, then the class, then the time."""
    standbys_only = not group.ranks and all(error.worker and group.kind not in (NODE, TOLD) for error in group.errors)
    return (group.kind in CONSEQUENCES, standbys_only, _ORDER.index(group.kind), _age(group.first))


def _age(error: CrashError) -> tuple[float, int]:
    return (
        error.when if error.when is not None else float("inf"),
        error.rank if error.rank is not None else 1 << 30,
    )


def _key(error: CrashError) -> tuple:
    if error.chain:
        raised = _shown(error.chain)
        return (class_of(error), raised.kinds[0], raised.frames[-_SAME_FRAMES:] or _without_numbers(raised.message))
    return (class_of(error), error.signal, error.exit_code, _without_numbers(error.told))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", text)


def _same(group: EqualErrors, other: EqualErrors) -> bool:
    return _key(group.first) == _key(other.first)


def _merged(groups: Iterable[EqualErrors]) -> list[EqualErrors]:
    """Return one group for each class, in the order of classes."""
    of_class: dict[str, list[CrashError]] = {}
    for group in groups:
        of_class.setdefault(group.kind, []).extend(group.errors)
    return [EqualErrors(kind, tuple(sorted(of_class[kind], key=_age))) for kind in _ORDER if kind in of_class]
