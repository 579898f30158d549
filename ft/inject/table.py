"""Every kind of fault, once: what breaks, what gives it away, what it is taken for, what comes of it.

``ft run --inject`` takes its kinds from here, the tests go through the rows, ``ft faults`` prints them, and the page
``docs/what_happens_when.md`` is made of them.
"""

from collections.abc import Callable
from functools import partial

from ft.control import verdict
from ft.control.verdict import HOST, NETWORK, SOFTWARE, TRANSIENT, USER, Verdict
from ft.inject.distributions import parse_duration
from ft.inject.faults import Fault
from ft.inject.kinds import (
    AGENT,
    CONTROL,
    DMR,
    FILES,
    GPU,
    HARMLESS,
    IN_PLACE,
    NETWORK_OF_NODE,
    REPLACED,
    RESTARTED,
    ROOT,
    START,
    STOPPED,
    UNNOTICED,
    Row,
    Sign,
)


def _error(*kinds: str, says: str = "") -> Callable[[], Verdict]:
    return partial(verdict.of_error, list(kinds), says)


def _exit(code: int) -> Callable[[], Verdict]:
    return partial(verdict.of_exit, code)


_LOST = partial(verdict.of_lost_agent, "n1", "nothing was heard of its agent")
_SILENT = "no heartbeat for"

GROUPS: dict[str, tuple[Row, ...]] = {
    "Processes": (
        Row(
            "kill",
            "SIGKILL for a worker, as the kernel's out-of-memory killer sends it",
            outcome=REPLACED,
            seen="killed by SIGKILL",
            sign=Sign(HOST, "SIGKILL", _exit(-9)),
        ),
        Row(
            "segfault",
            "a worker reads through a null pointer (SIGSEGV)",
            outcome=REPLACED,
            seen="killed by SIGSEGV, and the stack of each of its threads in its log",
            sign=Sign(HOST, "SIGSEGV", _exit(-11)),
        ),
        Row(
            "exit",
            "a worker ends with exit code 1 without a word",
            outcome=RESTARTED,
            seen="exited with code 1, with the last lines of its log",
            sign=Sign(SOFTWARE, "exit 1", _exit(1)),
        ),
        Row(
            "terminate",
            "SIGTERM for one worker, not by its agent",
            outcome=STOPPED,
            seen="SIGTERM received, the step it ended after, and the checkpoint that was saved",
            answer="All workers finish the step, save if there is --save, and end with code 0: whoever sends "
            "SIGTERM wants the run to end.",
        ),
        Row(
            "hang",
            "SIGSTOP for a worker",
            outcome=REPLACED,
            seen=f"{_SILENT} 0.3 s, its process is stopped",
            sign=Sign(HOST, "hang", partial(verdict.of_silence, 0.3, "T")),
        ),
        Row(
            "gil",
            "a C call in a worker keeps Python's interpreter lock and does not return",
            outcome=REPLACED,
            seen=f"{_SILENT} 1.0 s, its process is alive but silent; where its threads are is in its log",
            answer="In a worker's first step the limit is 30 s: imports and compilation hold the lock as well.",
            sign=Sign(HOST, "hang", partial(verdict.of_silence, 1.0, "S")),
        ),
        Row(
            "stall",
            "a worker's training thread sleeps for ever while its heartbeats go on",
            outcome=REPLACED,
            seen="in a step for 10 s while others wait for it (limit: 10 s and three steps)",
            answer="In a worker's first step, which may compile, the limit is 300 s.",
            sign=Sign(HOST, "stall", partial(verdict.of_stall, "step 7", 10.1, 10.0)),
        ),
        Row(
            "slow",
            "a worker's steps take longer for a while",
            outcome=HARMLESS,
            seen="steps that take longer, and in ft status the worker that all wait for",
        ),
    ),
    "Resources and devices": (
        Row(
            "out-of-memory",
            "a worker's address space is used up: an allocation fails",
            outcome=REPLACED,
            seen="MemoryError, or torch's: Cannot allocate memory",
            answer="The memory is the process's own limit: the one in its place begins with a fresh one.",
            sign=Sign(HOST, "exception", _error("MemoryError", "Exception")),
        ),
        Row(
            "out-of-files",
            "a worker has no file descriptor left",
            outcome=REPLACED,
            seen="OSError: Too many open files",
            sign=Sign(
                HOST, "exception", _error("OSError", "Exception", says="[Errno 24] Too many open files: '/dev/null'")
            ),
        ),
        Row(
            "disk-full",
            "nothing that a worker writes finds room for a while",
            outcome=HARMLESS,
            seen="that the checkpoint was not saved, by which rank and why",
            answer="The save is given up as a whole, older checkpoints stay, the next one is tried when it is due. "
            "Lines of the worker's log are left out, those of the metrics file wait in memory.",
        ),
        Row(
            "io-error",
            "a worker's read fails in the kernel (EIO)",
            outcome=REPLACED,
            seen="OSError: Input/output error",
            answer="The node counts as suspect: standbys of other nodes come first, and no further worker is "
            "started there while there is another node.",
            sign=Sign(NETWORK, "exception", _error("OSError", "Exception", says="[Errno 5] Input/output error")),
        ),
        Row(
            "lose-device",
            "a worker's device is gone: what CUDA says then is raised",
            outcome=REPLACED,
            seen="RuntimeError: CUDA error: no CUDA-capable device is detected",
            answer="The node counts as suspect.",
            sign=Sign(
                HOST,
                "exception",
                _error("RuntimeError", "Exception", says="CUDA error: no CUDA-capable device is detected"),
            ),
        ),
        Row(
            "cuda-fault",
            "a kernel reads beyond its tensor: the CUDA context is lost",
            outcome=RESTARTED,
            seen="AcceleratorError: CUDA error: device-side assert triggered",
            answer="The same input would trip the same assertion on any device, so no standby is spent on it.",
            sign=Sign(
                SOFTWARE,
                "exception",
                _error("AcceleratorError", "RuntimeError", says="CUDA error: device-side assert triggered"),
            ),
            needs=GPU,
        ),
    ),
    "Errors that a worker catches": (
        Row(
            "exception",
            "a worker catches what is known to be transient",
            how="error=recoverable",
            outcome=IN_PLACE,
            seen="RecoverableError with its text",
            answer="The third time within a minute, or within ten steps, the worker is replaced.",
            sign=Sign(TRANSIENT, "exception", _error("RecoverableError", "FtError", "Exception")),
        ),
        Row(
            "exception",
            "an operation of a worker runs into its time limit",
            how="error=timeout",
            outcome=IN_PLACE,
            seen="TimeoutError with its text",
            answer="As any transient fault: the third time the worker is replaced.",
            sign=Sign(TRANSIENT, "exception", _error("TimeoutError", "OSError", "Exception")),
        ),
        Row(
            "exception",
            "a worker finds its node unfit (ReplaceNodeError)",
            how="error=node",
            outcome=REPLACED,
            seen="ReplaceNodeError with its text",
            answer="The node counts as suspect.",
            sign=Sign(HOST, "exception", _error("ReplaceNodeError", "FtError", "Exception")),
        ),
        Row(
            "exception",
            "a worker catches what nothing is known about",
            how="error=software",
            outcome=RESTARTED,
            seen="the exception, with its trace in the worker's log",
            answer="The same error again at the same step ends the run: a restart leads there again.",
            sign=Sign(SOFTWARE, "exception", _error("RuntimeError", "Exception", says="a bug")),
        ),
        Row(
            "exception",
            "a worker finds that its input cannot work (UserError)",
            how="error=user",
            outcome=STOPPED,
            seen="the problem and how to fix it; exit code 2",
            sign=Sign(USER, "exception", _error("UserError", "FtError", "Exception", says="no")),
        ),
    ),
    "Data in memory": (
        Row(
            "corrupt-tensor",
            "a parameter of a worker becomes NaN",
            how="value=nan",
            outcome=RESTARTED,
            seen="NonFiniteLossError: the loss of a microbatch is nan",
            answer="What is in memory may have it already, so all state comes from the checkpoint. One that is in the "
            "checkpoint too comes back at the same step, and ends the run.",
            sign=Sign(
                SOFTWARE, "exception", _error("NonFiniteLossError", "FtError", says="the loss of a microbatch is nan")
            ),
        ),
        Row(
            "corrupt-tensor",
            "one bit of a worker's parameters flips",
            how="value=bit",
            outcome=UNNOTICED,
            seen="nothing but, perhaps, a loss curve that moves",
            answer="The loss differs from there on. Only computing twice finds it: see DMR.",
        ),
        Row(
            "stale-state",
            "a worker goes on with its optimizer shard of an earlier step",
            outcome=UNNOTICED,
            seen="nothing but, perhaps, a loss curve that moves",
            answer="The loss differs from there on. A shard has no second owner to be compared with: see DMR.",
        ),
        Row(
            "bit-flip",
            "one bit of what an operator computes flips, or of what a rank receives",
            how="mode=once",
            outcome=HARMLESS,
            seen="DMR: step, rank, host, device, operator, layer, microbatch, and how many elements differ",
            answer="Before its result is kept, every rank takes the step once more.",
            needs=DMR,
        ),
        Row(
            "bit-flip",
            "results of a worker have a flipped bit again and again",
            how="mode=repeat",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="After --ft-dmr-retries further attempts; the node counts as suspect.",
            sign=Sign(HOST, "exception", _error("SuspectError", "ReplaceNodeError", "FtError", "Exception")),
            needs=DMR,
        ),
        Row(
            "bit-flip",
            "a bit is stuck in one unit of a worker's device",
            how="mode=stuck",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="Where the bit happens to be right nothing differs. Otherwise as for flips again and again.",
            sign=Sign(HOST, "exception", _error("SuspectError", "ReplaceNodeError", "FtError", "Exception")),
            needs=DMR,
        ),
        Row(
            "corrupt-snapshot",
            "one byte of a worker's own snapshot flips",
            how="copies=own",
            outcome=HARMLESS,
            seen="nothing; in the next recovery, that the state came from a peer's copy",
            answer="Every snapshot is verified before it is used, and the next source takes its place: a peer's copy.",
        ),
        Row(
            "corrupt-snapshot",
            "one byte of each copy that a worker holds for peers flips",
            how="copies=peer",
            outcome=HARMLESS,
            seen="nothing; in the recovery that would need it, that the copy is damaged",
            answer="A damaged copy is never used: another peer's copy serves, or an earlier step, or the checkpoint.",
        ),
        Row(
            "stale-snapshot",
            "a worker has lost the newest copies that it held for peers",
            outcome=HARMLESS,
            seen="nothing; in the recovery that would need one, a step more is redone",
            answer="Workers say which steps they hold; the newest step that all can be given is gone back to.",
        ),
    ),
    "Messages": (
        Row(
            "drop",
            "one TCP connection of a process group breaks",
            outcome=IN_PLACE,
            seen="the group that lost a connection, and that nobody has died",
            answer="Where gloo does not notice, all wait, which is noticed after 15 s. The third time within a minute, "
            "or within ten steps, the worker is replaced.",
            sign=Sign(TRANSIENT, "connection", partial(verdict.of_suspicion, "dp", "Connection closed by peer")),
        ),
        Row(
            "out-of-step",
            "a worker starts a collective operation that no other one does",
            outcome=REPLACED,
            seen="gloo ends the process in which operations of different sizes meet: killed by SIGABRT",
            answer="No step is committed while ranks disagree, so what was computed out of step is thrown away. "
            "Operations of one size do not fail but stand still: they are recovered in place after 15 s.",
            sign=Sign(HOST, "SIGABRT", _exit(-6)),
        ),
        Row(
            "lose-frame",
            "a chunk of a snapshot on its way to a peer is lost",
            outcome=IN_PLACE,
            seen="that all workers wait, one of them in which group and for how long",
            sign=Sign(TRANSIENT, "standstill", partial(verdict.of_standstill, "snapshot", 15.1, 15.0)),
        ),
        Row(
            "duplicate-frame",
            "a chunk of a snapshot reaches the peer twice",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer takes no chunk out of its turn; the snapshot is sent again.",
        ),
        Row(
            "reorder-frames",
            "two chunks of a snapshot change places on their way",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer takes no chunk out of its turn; the snapshot is sent again.",
        ),
        Row(
            "delay-frames",
            "a snapshot's chunks reach the peer late",
            outcome=HARMLESS,
            seen="a step that takes longer",
            answer="The optimizer step waits until the last snapshot is safe.",
        ),
        Row(
            "corrupt-frame",
            "a byte of a snapshot flips on its way to a peer",
            outcome=HARMLESS,
            seen="nothing",
            answer="The checksum is wrong on arrival; the snapshot is sent again.",
        ),
        Row(
            "lose-reports",
            "what a worker tells its agent is lost for half a second",
            outcome=HARMLESS,
            seen="nothing",
            answer="Heartbeats may be missing for up to a second.",
        ),
        Row(
            "lose-reports",
            "what a worker tells its agent is lost for five seconds",
            how="for=5s",
            outcome=REPLACED,
            seen=f"{_SILENT} 1.0 s, its process is alive but silent",
            sign=Sign(HOST, "hang", partial(verdict.of_silence, 1.0, "S")),
        ),
        Row(
            "duplicate-reports",
            "each report of a worker comes twice for a while",
            outcome=HARMLESS,
            seen="nothing",
            answer="A report that was taken before is ignored; the journal says so.",
        ),
        Row(
            "reorder-reports",
            "each two reports of a worker change places for a while",
            outcome=HARMLESS,
            seen="nothing",
        ),
        Row("delay-reports", "each report of a worker comes 0.3 s late for a while", outcome=HARMLESS, seen="nothing"),
    ),
    "Checkpoints": (
        Row(
            "corrupt-checkpoint",
            "one byte of the newest checkpoint flips",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file with the wrong checksum and which checkpoint is loaded",
            answer="Every file is verified before a checkpoint is loaded; the one before it is loaded instead.",
        ),
        Row(
            "truncate-checkpoint",
            "a file of the newest checkpoint loses its second half",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file that is too short and which checkpoint is loaded",
            answer="As for a flipped byte.",
        ),
        Row(
            "remove-checkpoint",
            "a file of the newest checkpoint is gone",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file that is missing and which checkpoint is loaded",
            answer="As for a flipped byte.",
        ),
    ),
    "Nodes and the control plane": (
        Row(
            "kill",
            "a node loses its power: its agent and all its workers are gone",
            how="node=n1",
            where=AGENT,
            outcome=REPLACED,
            seen="node n1 is lost, and each of its workers that a standby replaces",
            answer="As many standbys as it had workers are needed; a node whose peers hold all its copies loses "
            "nothing.",
            sign=Sign(HOST, "node lost", _LOST),
        ),
        Row(
            "kill-agent",
            "an agent is killed; its workers end with it",
            how="node=n1",
            where=AGENT,
            outcome=REPLACED,
            seen="node n1 is lost, and each of its workers that a standby replaces",
            sign=Sign(HOST, "node lost", _LOST),
        ),
        Row(
            "partition",
            "a node's network is gone for 10 s",
            how="node=n1",
            where=NETWORK_OF_NODE,
            outcome=REPLACED,
            seen="node n1 is lost: nothing was heard of its agent for 3 s",
            sign=Sign(HOST, "node lost", _LOST),
            needs=ROOT,
        ),
        Row(
            "kill-control",
            "SIGKILL for the control plane",
            where=CONTROL,
            outcome=HARMLESS,
            seen="that the control plane was started again",
            answer="Its agent starts it again from the journal; training does not stop for it.",
        ),
    ),
    "Before training": (
        Row(
            "drift",
            "a worker is started with other flags, environment or code than the others",
            where=START,
            outcome=STOPPED,
            seen="each setting that differs, with both values; exit code 2",
            answer="Workers say how they are set up before they get a logical rank; no step is trained.",
            sign=Sign(USER, "drift", partial(verdict.of_drift, ["--lr: 0.01 here, 0.02 there"])),
        ),
    ),
}
"""Heading -> rows."""

TABLE = tuple(row for rows in GROUPS.values() for row in rows)
NAMES = tuple(dict.fromkeys(row.kind for row in TABLE if row.where != START))
"""The kinds that ``--inject`` knows."""


def rows_of(kind: str) -> list[Row]:
    """The ways of a kind."""
    return [row for row in TABLE if row.kind == kind]


def row_of(fault: Fault) -> Row:
    """The way of its kind that a planned fault is.

    Raises:
        StopIteration: there is none of its kind.
    """
    rows = sorted(rows_of(fault.kind), key=lambda row: not row.how)
    return next(row for row in rows if all(_has(fault, pair) for pair in filter(None, row.how.split(":"))))


def _has(fault: Fault, pair: str) -> bool:
    key, _, value = pair.partition("=")
    if key == "node":
        return fault.is_agents
    if key == "mode":
        return fault.flip is not None and fault.flip.mode == value
    if key == "for":
        return fault.seconds is not None and fault.seconds >= parse_duration(value)
    return getattr(fault, key) == value
