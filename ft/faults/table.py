"""The table of all kinds of faults: what each one breaks, how it is detected, how it is classified, and its outcome.

``ft run --inject`` takes its kinds from this table, the tests iterate over its rows, ``ft faults`` prints it, and the
page ``docs/what_happens_when.md`` is generated from it. A row says what the injection of a fault does, what a person
who watches the run sees, how the control plane detects the fault, and what the outcome is. Detections are answers of
the failure policy ``ft.faults.verdict``.
"""

from dataclasses import dataclass

from ft.base.quantities import seconds
from ft.faults import verdict
from ft.faults.faults import Fault
from ft.faults.verdict import Verdict

HARMLESS, IN_PLACE, REPLACED, RESTARTED = "harmless", "recovered in place", "replaced", "warm restart"
STOPPED, UNNOTICED = "stopped with a message", "not noticed"
MEANING = {
    HARMLESS: "Training continues, and its losses equal those of a run without the fault.",
    IN_PLACE: "The epoch ends. Every worker keeps its seat, broken groups are rebuilt, and all workers return to the "
    "last committed step, which is in memory: at most one step is repeated.",
    REPLACED: "The worker is killed if it is still alive. A standby takes its logical rank and restores the state "
    "from a peer copy. All workers return to the last committed step: at most one step is repeated.",
    RESTARTED: "All workers are started again from the warm pool and continue from the newest valid checkpoint of "
    "--save (without one, from the first step).",
    STOPPED: "The run ends on all nodes with a message that says why.",
    UNNOTICED: "Nothing in a hot-swap run without DMR detects the fault; the losses differ from then on.",
}
"""Outcome of a fault if nothing else fails -> what it means, from the mildest to the worst."""

OF_ACTION = {verdict.RETRY: IN_PLACE, verdict.REPLACE: REPLACED, verdict.RESTART: RESTARTED, verdict.STOP: STOPPED}
"""Action of a verdict (``ft.faults.verdict``) -> outcome."""

WORKER, AGENT, NETWORK_OF_NODE, FILES, CONTROL, START = "worker", "agent", "network", "files", "control", "start"
"""Where a fault is injected. START: not by ``--inject``, but by starting one worker with other settings."""

ROOT, GPU, DMR = "root", "gpu", "dmr"
"""What the injection of a fault may require: root permissions, a GPU, or double execution of operators (DMR)."""


@dataclass(frozen=True)
class FaultRow:
    """One kind of fault, or one variant of a kind that has another outcome than its other variants.

    Attributes:
        kind: name of the kind in ``--inject``.
        does: what the injection does, in words.
        outcome: key of ``MEANING``: the result if nothing else fails.
        seen: what a person who watches the run sees.
        sign: what the failure policy says when the control plane detects it, or None if it detects nothing.
        seldom: other signals of the same category that the same fault can lead to.
        answer: what the system does in addition to the meaning of the outcome.
        how: keys of ``--inject`` that select this variant, "key=value[:key=value]".
        where: where it is injected (WORKER, AGENT, ...).
        needs: what the injection requires: ROOT, GPU, DMR or "" (nothing).
    """

    kind: str
    does: str
    outcome: str
    seen: str
    sign: Verdict | None = None
    answer: str = ""
    how: str = ""
    where: str = WORKER
    needs: str = ""
    seldom: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the unique name of the row: the kind with the keys of the variant."""
        return f"{self.kind}:{self.how}" if self.how else self.kind

    def spec(self, when: str) -> str:
        """Return the fault as a value of ``--inject``. ``when`` is its time and victim, for example "step=4:rank=1"."""
        return f"{self.kind}@{when}" + (f":{self.how}" if self.how else "")


def error(*kinds: str, says: str = "") -> Verdict:
    """Return the classification of an exception whose class and base classes have the names ``kinds``."""
    return verdict.of_error(kinds, says)


ended = verdict.of_exit
LOST = verdict.of_lost_agent("n1", "nothing was heard of its agent")
SILENT = "no heartbeat for"
"""Beginning of the message about missing heartbeats."""


_OF_WORKERS: dict[str, tuple[FaultRow, ...]] = {
    "Processes": (
        FaultRow(
            "kill",
            "SIGKILL for a worker, as the kernel's out-of-memory killer sends it",
            outcome=REPLACED,
            seen="killed by SIGKILL",
            sign=ended(-9),
        ),
        FaultRow(
            "segfault",
            "a worker reads through a null pointer (SIGSEGV)",
            outcome=REPLACED,
            seen="killed by SIGSEGV, and the stack of each of its threads in its log",
            sign=ended(-11),
        ),
        FaultRow(
            "exit",
            "a worker ends with exit code 1 without a message",
            outcome=RESTARTED,
            seen="exited with code 1, with the last lines of its log",
            sign=ended(1),
        ),
        FaultRow(
            "terminate",
            "SIGTERM for one worker from outside, not from its agent",
            outcome=STOPPED,
            seen="SIGTERM received, the step it ended after, and the checkpoint that was saved",
            answer="All workers finish the step, save a checkpoint if --save is given, and the run ends with code 75, "
            "because SIGTERM requests its end.",
        ),
        FaultRow(
            "hang",
            "SIGSTOP for a worker",
            outcome=REPLACED,
            seen=f"{SILENT} 0.3 s, its process is stopped",
            sign=verdict.of_silence(0.3, "T"),
        ),
        FaultRow(
            "gil",
            "a C call in a worker keeps Python's interpreter lock and does not return",
            outcome=REPLACED,
            seen="in a step without heartbeats for 10 s while others wait for it (limit: 10 s and three steps); its "
            "log has the stacks of its threads",
            answer="A garbage collection, an import or a compilation holds the lock as well, and ends. If no other "
            "worker waits, and in a worker's first step, the limit is 30 s.",
            sign=verdict.of_stall("step 7 without heartbeats", 10.1, 10.0),
        ),
        FaultRow(
            "stall",
            "a worker's training thread sleeps for ever while its heartbeats go on",
            outcome=REPLACED,
            seen="in a step for 10 s while others wait for it (limit: 10 s and three steps)",
            answer="In a worker's first step, which may compile, the limit is 300 s.",
            sign=verdict.of_stall("step 7", 10.1, 10.0),
        ),
        FaultRow(
            "slow",
            "a worker's steps take longer for a while",
            outcome=HARMLESS,
            seen="steps that take longer; ft status, the report and an event name a worker that is slow for some 40 "
            "steps",
            answer="With --ft-evict-stragglers FACTOR and a standby that is ready, a worker that is slower by this "
            "factor is replaced.",
        ),
    ),
    "Resources and devices": (
        FaultRow(
            "out-of-memory",
            "a worker's address space is used up: an allocation fails",
            outcome=REPLACED,
            seen="MemoryError, or torch's: Cannot allocate memory",
            answer="The limit belongs to the process; the worker that replaces it has a new limit.",
            sign=error("MemoryError", "Exception"),
        ),
        FaultRow(
            "out-of-files",
            "a worker has no file descriptor left",
            outcome=REPLACED,
            seen="OSError: Too many open files",
            sign=error("OSError", "Exception", says="[Errno 24] Too many open files: '/dev/null'"),
        ),
        FaultRow(
            "disk-full",
            "a worker cannot write to any file for a while, as on a full disk",
            outcome=HARMLESS,
            seen="a message that the checkpoint was not saved, by which rank and why",
            answer="The whole save is abandoned, older checkpoints are kept, and the next save happens when it is "
            "due. Lines of the worker's log are dropped; lines of the metrics file wait in memory. The end of "
            "the run, `ft status` and `ft report` say which lines were lost.",
        ),
        FaultRow(
            "io-error",
            "a worker's read fails in the kernel (EIO)",
            outcome=REPLACED,
            seen="OSError: Input/output error",
            answer="The node counts as suspect: standbys of other nodes are preferred, and no new worker is started "
            "there while there is another node.",
            sign=error("OSError", "Exception", says="[Errno 5] Input/output error"),
        ),
        FaultRow(
            "lose-device",
            "a worker's device is lost: the error that CUDA reports then is raised",
            outcome=REPLACED,
            seen="RuntimeError: CUDA error: no CUDA-capable device is detected",
            answer="The node counts as suspect.",
            sign=error("RuntimeError", "Exception", says="CUDA error: no CUDA-capable device is detected"),
        ),
        FaultRow(
            "cuda-fault",
            "a kernel reads beyond its tensor: the CUDA context is lost",
            outcome=RESTARTED,
            seen="AcceleratorError: CUDA error: device-side assert triggered",
            answer="The same input would trigger the same assertion on any device, so no standby is used.",
            sign=error("AcceleratorError", "RuntimeError", says="CUDA error: device-side assert triggered"),
            needs=GPU,
        ),
    ),
    "Errors that a worker catches": (
        FaultRow(
            "exception",
            "a worker catches an exception that is known to be transient",
            how="error=recoverable",
            outcome=IN_PLACE,
            seen="RecoverableError with its text",
            answer="The third time within a minute, or within ten steps, the worker is replaced.",
            sign=error("RecoverableError", "FtError", "Exception"),
        ),
        FaultRow(
            "exception",
            "an operation of a worker runs into its time limit",
            how="error=timeout",
            outcome=IN_PLACE,
            seen="TimeoutError with its text",
            answer="As for any transient fault, the worker is replaced the third time.",
            sign=error("TimeoutError", "OSError", "Exception"),
        ),
        FaultRow(
            "exception",
            "a worker finds its node unfit (ReplaceNodeError)",
            how="error=node",
            outcome=REPLACED,
            seen="ReplaceNodeError with its text",
            answer="The node counts as suspect.",
            sign=error("ReplaceNodeError", "FtError", "Exception"),
        ),
        FaultRow(
            "exception",
            "a worker catches an exception of an unknown kind",
            how="error=software",
            outcome=RESTARTED,
            seen="the exception, with its trace in the worker's log",
            answer="If the same error occurs again at the same step, the run ends, because a restart would lead to "
            "it again.",
            sign=error("RuntimeError", "Exception", says="a bug"),
        ),
        FaultRow(
            "exception",
            "a worker finds that its input is invalid (UserError)",
            how="error=user",
            outcome=STOPPED,
            seen="the problem and how to fix it; exit code 2",
            sign=error("UserError", "FtError", "Exception", says="no"),
        ),
    ),
    "Data in memory": (
        FaultRow(
            "corrupt-tensor",
            "a parameter of a worker becomes NaN",
            how="value=nan",
            outcome=RESTARTED,
            seen="NonFiniteLossError: the loss of a microbatch is nan",
            answer="Snapshots in memory may contain the NaN, so all state is loaded from the checkpoint. If the "
            "checkpoint contains it, too, it recurs at the same step and ends the run.",
            sign=error("NonFiniteLossError", "FtError", says="the loss of a microbatch is nan"),
        ),
        FaultRow(
            "corrupt-tensor",
            "one bit of a worker's parameters flips",
            how="value=bit",
            outcome=UNNOTICED,
            seen="nothing, except perhaps a change in the loss curve",
            answer="The loss differs from then on. Only double execution (DMR) detects the fault.",
        ),
        FaultRow(
            "stale-state",
            "a worker continues with its optimizer shard of an earlier step",
            outcome=UNNOTICED,
            seen="nothing, except perhaps a change in the loss curve",
            answer="The loss differs from then on. No other worker owns the shard, so there is nothing to compare it "
            "with.",
        ),
        FaultRow(
            "bit-flip",
            "one bit flips in the result of an operator, or in a received message",
            how="mode=once",
            outcome=HARMLESS,
            seen="DMR: step, rank, host, device, operator, layer, microbatch, and how many elements differ",
            answer="All ranks repeat the step before its result is used.",
            needs=DMR,
        ),
        FaultRow(
            "bit-flip",
            "results of a worker have a flipped bit repeatedly",
            how="mode=repeat",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="The worker is replaced after --ft-dmr-retries further attempts; the node counts as suspect.",
            sign=error("SuspectError", "ReplaceNodeError", "FtError", "Exception"),
            needs=DMR,
        ),
        FaultRow(
            "bit-flip",
            "a bit is stuck in one unit of a worker's device",
            how="mode=stuck",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="Where the bit happens to be right, nothing differs. Otherwise the outcome is that of repeated "
            "flips.",
            sign=error("SuspectError", "ReplaceNodeError", "FtError", "Exception"),
            needs=DMR,
        ),
        FaultRow(
            "corrupt-snapshot",
            "one byte of a worker's own snapshot flips",
            how="copies=own",
            outcome=HARMLESS,
            seen="nothing; the next recovery reports that the state came from a peer's copy",
            answer="Every snapshot is verified before it is used; a peer's copy is used instead.",
        ),
        FaultRow(
            "corrupt-snapshot",
            "one byte of each copy that a worker holds for peers flips",
            how="copies=peer",
            outcome=HARMLESS,
            seen="nothing; the recovery that would need the copy reports that it is damaged",
            answer="A damaged copy is never used: another peer's copy, an earlier step or the checkpoint is used "
            "instead.",
        ),
        FaultRow(
            "stale-snapshot",
            "a worker has lost the newest copies that it held for peers",
            outcome=HARMLESS,
            seen="nothing; the recovery that would need one repeats one more step",
            answer="Workers report which steps they hold; all return to the newest step of which every rank can get "
            "its state.",
        ),
    ),
}


# Heading in the table -> rows below it.
_OUTSIDE_WORKERS: dict[str, tuple[FaultRow, ...]] = {
    "Messages": (
        FaultRow(
            "drop",
            "one TCP connection of a process group breaks",
            outcome=IN_PLACE,
            seen="the group that lost a connection, and that no process has died",
            answer="If gloo does not notice the loss, all workers wait, which is detected after 15 s. The third time "
            "within a minute, or within ten steps, the worker is replaced.",
            sign=verdict.of_suspicion("dp", "Connection closed by peer"),
            seldom=("standstill",),
        ),
        FaultRow(
            "out-of-step",
            "a worker starts a collective operation that no other worker starts",
            outcome=REPLACED,
            seen="gloo ends the process in which operations of different sizes meet: killed by SIGABRT, seldom by "
            "SIGSEGV: Python writes the stacks of all threads then, and fails if one of them moves on",
            answer="No step is committed while ranks disagree, so wrong results are discarded. Operations of equal "
            "size do not fail but block: they are recovered in place after 15 s.",
            sign=ended(-6),
            seldom=("SIGSEGV",),
        ),
        FaultRow(
            "lose-frame",
            "a chunk of a snapshot on its way to a peer is lost",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer rejects the chunk after it, which is out of order; the snapshot is sent again.",
        ),
        FaultRow(
            "duplicate-frame",
            "a chunk of a snapshot reaches the peer twice",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer rejects a chunk that is out of order; the snapshot is sent again.",
        ),
        FaultRow(
            "reorder-frames",
            "two chunks of a snapshot arrive in swapped order",
            outcome=HARMLESS,
            seen="nothing",
            answer="The peer rejects a chunk that is out of order; the snapshot is sent again.",
        ),
        FaultRow(
            "delay-frames",
            "a snapshot's chunks reach the peer late",
            outcome=HARMLESS,
            seen="a step that takes longer",
            answer="The optimizer step waits until the last snapshot is safe.",
        ),
        FaultRow(
            "corrupt-frame",
            "a byte of a snapshot flips on its way to a peer",
            outcome=HARMLESS,
            seen="nothing",
            answer="The checksum is wrong on arrival; the snapshot is sent again.",
        ),
        FaultRow(
            "lose-reports",
            "the reports of a worker to its agent are lost for half a second",
            outcome=HARMLESS,
            seen="nothing",
            answer="A report that needs an answer is sent again. If heartbeats are missing for 10 s and three steps "
            "while others wait, the worker is replaced.",
        ),
        FaultRow(
            "duplicate-reports",
            "each report of a worker arrives twice for a while",
            outcome=HARMLESS,
            seen="nothing",
            answer="A report that was processed before is ignored; the journal records this.",
        ),
        FaultRow(
            "reorder-reports",
            "pairs of successive reports of a worker arrive in swapped order for a while",
            outcome=HARMLESS,
            seen="nothing",
        ),
        FaultRow(
            "delay-reports", "each report of a worker arrives 0.3 s late for a while", outcome=HARMLESS, seen="nothing"
        ),
    ),
    "Checkpoints": (
        FaultRow(
            "corrupt-checkpoint",
            "one byte of the newest checkpoint flips",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file with the wrong checksum and which checkpoint is loaded",
            answer="Every file is verified before a checkpoint is loaded; the previous checkpoint is loaded instead.",
        ),
        FaultRow(
            "truncate-checkpoint",
            "a file of the newest checkpoint loses its second half",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file that is too short and which checkpoint is loaded",
            answer="As for a flipped byte.",
        ),
        FaultRow(
            "remove-checkpoint",
            "a file of the newest checkpoint is missing",
            where=FILES,
            outcome=HARMLESS,
            seen="nothing; at the next warm restart, the file that is missing and which checkpoint is loaded",
            answer="As for a flipped byte.",
        ),
    ),
    "Nodes and the control plane": (
        FaultRow(
            "kill",
            "a node loses its power: its agent and all its workers are gone",
            how="node=n1",
            where=AGENT,
            outcome=REPLACED,
            seen="node n1 is lost, and each of its workers that a standby replaces",
            answer="The run needs as many standbys as the node had workers. No state is lost if peers on other nodes "
            "hold copies of it.",
            sign=LOST,
        ),
        FaultRow(
            "kill-agent",
            "an agent is killed; its workers end with it",
            how="node=n1",
            where=AGENT,
            outcome=REPLACED,
            seen="node n1 is lost, and each of its workers that a standby replaces",
            sign=LOST,
        ),
        FaultRow(
            "partition",
            "a node's network is gone for 10 s",
            how="node=n1",
            where=NETWORK_OF_NODE,
            outcome=REPLACED,
            seen="node n1 is lost: nothing was heard of its agent for 3.5 s",
            sign=LOST,
            needs=ROOT,
        ),
        FaultRow(
            "kill-control",
            "SIGKILL for the control plane",
            where=CONTROL,
            outcome=HARMLESS,
            seen="that the control plane was restarted",
            answer="Its agent restarts it from the journal; training does not stop.",
        ),
    ),
    "Before training": (
        FaultRow(
            "drift",
            "a worker is started with other flags, environment or code than the others",
            where=START,
            outcome=STOPPED,
            seen="each setting that differs, with both values; exit code 2",
            answer="Workers report their settings before they get a logical rank; no step is trained.",
            sign=verdict.of_drift(["--lr: 0.01 here, 0.02 there"]),
        ),
    ),
}


GROUPS: dict[str, tuple[FaultRow, ...]] = {**_OF_WORKERS, **_OUTSIDE_WORKERS}
"""Heading -> rows."""

TABLE = tuple(row for rows in GROUPS.values() for row in rows)
NAMES = tuple(dict.fromkeys(row.kind for row in TABLE if row.where != START))
"""The kinds that ``--inject`` accepts."""


def rows_of(kind: str) -> list[FaultRow]:
    """Return the rows of a kind, one for each variant."""
    return [row for row in TABLE if row.kind == kind]


def row_of(fault: Fault) -> FaultRow:
    """Return the row of the variant that a planned fault belongs to.

    Raises:
        StopIteration: no row has its kind.
    """
    rows = sorted(rows_of(fault.kind), key=lambda row: not row.how)
    return next(row for row in rows if all(_has(fault, pair) for pair in filter(None, row.how.split(":"))))


def _has(fault: Fault, pair: str) -> bool:
    key, _, value = pair.partition("=")
    if key == "node":
        return fault.is_injected_by_agent
    if key == "mode":
        return fault.flip is not None and fault.flip.mode == value
    if key == "for":
        return fault.seconds is not None and fault.seconds >= seconds(value, bare=1.0)
    return getattr(fault, key) == value
