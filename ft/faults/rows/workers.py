"""Table rows for the faults of one worker: its process, its resources, its exceptions, and its data in memory."""

from functools import partial

from ft.faults import verdict
from ft.faults.kinds import (
    DMR,
    GPU,
    HARMLESS,
    IN_PLACE,
    REPLACED,
    RESTARTED,
    STOPPED,
    UNNOTICED,
    Row,
    Sign,
)
from ft.faults.rows.signs import SILENT, ended, error
from ft.faults.verdict import HOST, NETWORK, SOFTWARE, TRANSIENT, USER

GROUPS: dict[str, tuple[Row, ...]] = {
    "Processes": (
        Row(
            "kill",
            "SIGKILL for a worker, as the kernel's out-of-memory killer sends it",
            outcome=REPLACED,
            seen="killed by SIGKILL",
            sign=Sign(HOST, "SIGKILL", ended(-9)),
        ),
        Row(
            "segfault",
            "a worker reads through a null pointer (SIGSEGV)",
            outcome=REPLACED,
            seen="killed by SIGSEGV, and the stack of each of its threads in its log",
            sign=Sign(HOST, "SIGSEGV", ended(-11)),
        ),
        Row(
            "exit",
            "a worker ends with exit code 1 without a message",
            outcome=RESTARTED,
            seen="exited with code 1, with the last lines of its log",
            sign=Sign(SOFTWARE, "exit 1", ended(1)),
        ),
        Row(
            "terminate",
            "SIGTERM for one worker from outside, not from its agent",
            outcome=STOPPED,
            seen="SIGTERM received, the step it ended after, and the checkpoint that was saved",
            answer="All workers finish the step, save a checkpoint if --save is given, and the run ends with code 75, "
            "because SIGTERM requests its end.",
        ),
        Row(
            "hang",
            "SIGSTOP for a worker",
            outcome=REPLACED,
            seen=f"{SILENT} 0.3 s, its process is stopped",
            sign=Sign(HOST, "hang", partial(verdict.of_silence, 0.3, "T")),
        ),
        Row(
            "gil",
            "a C call in a worker keeps Python's interpreter lock and does not return",
            outcome=REPLACED,
            seen="in a step without heartbeats for 10 s while others wait for it (limit: 10 s and three steps); its "
            "log has the stacks of its threads",
            answer="A garbage collection, an import or a compilation holds the lock as well, and ends. If no other "
            "worker waits, and in a worker's first step, the limit is 30 s.",
            sign=Sign(HOST, "stall", partial(verdict.of_stall, "step 7 without heartbeats", 10.1, 10.0)),
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
            seen="steps that take longer; ft status, the report and an event name a worker that is slow for some 40 "
            "steps",
            answer="With --ft-evict-stragglers FACTOR and a standby that is ready, a worker that is slower by this "
            "factor is replaced.",
        ),
    ),
    "Resources and devices": (
        Row(
            "out-of-memory",
            "a worker's address space is used up: an allocation fails",
            outcome=REPLACED,
            seen="MemoryError, or torch's: Cannot allocate memory",
            answer="The limit belongs to the process; the worker that replaces it has a new limit.",
            sign=Sign(HOST, "exception", error("MemoryError", "Exception")),
        ),
        Row(
            "out-of-files",
            "a worker has no file descriptor left",
            outcome=REPLACED,
            seen="OSError: Too many open files",
            sign=Sign(
                HOST, "exception", error("OSError", "Exception", says="[Errno 24] Too many open files: '/dev/null'")
            ),
        ),
        Row(
            "disk-full",
            "a worker cannot write to any file for a while, as on a full disk",
            outcome=HARMLESS,
            seen="a message that the checkpoint was not saved, by which rank and why",
            answer="The whole save is abandoned, older checkpoints are kept, and the next save happens when it is "
            "due. Lines of the worker's log are dropped; lines of the metrics file wait in memory. The end of "
            "the run, `ft status` and `ft report` say which lines were lost.",
        ),
        Row(
            "io-error",
            "a worker's read fails in the kernel (EIO)",
            outcome=REPLACED,
            seen="OSError: Input/output error",
            answer="The node counts as suspect: standbys of other nodes are preferred, and no new worker is started "
            "there while there is another node.",
            sign=Sign(NETWORK, "exception", error("OSError", "Exception", says="[Errno 5] Input/output error")),
        ),
        Row(
            "lose-device",
            "a worker's device is lost: the error that CUDA reports then is raised",
            outcome=REPLACED,
            seen="RuntimeError: CUDA error: no CUDA-capable device is detected",
            answer="The node counts as suspect.",
            sign=Sign(
                HOST,
                "exception",
                error("RuntimeError", "Exception", says="CUDA error: no CUDA-capable device is detected"),
            ),
        ),
        Row(
            "cuda-fault",
            "a kernel reads beyond its tensor: the CUDA context is lost",
            outcome=RESTARTED,
            seen="AcceleratorError: CUDA error: device-side assert triggered",
            answer="The same input would trigger the same assertion on any device, so no standby is used.",
            sign=Sign(
                SOFTWARE,
                "exception",
                error("AcceleratorError", "RuntimeError", says="CUDA error: device-side assert triggered"),
            ),
            needs=GPU,
        ),
    ),
    "Errors that a worker catches": (
        Row(
            "exception",
            "a worker catches an exception that is known to be transient",
            how="error=recoverable",
            outcome=IN_PLACE,
            seen="RecoverableError with its text",
            answer="The third time within a minute, or within ten steps, the worker is replaced.",
            sign=Sign(TRANSIENT, "exception", error("RecoverableError", "FtError", "Exception")),
        ),
        Row(
            "exception",
            "an operation of a worker runs into its time limit",
            how="error=timeout",
            outcome=IN_PLACE,
            seen="TimeoutError with its text",
            answer="As for any transient fault, the worker is replaced the third time.",
            sign=Sign(TRANSIENT, "exception", error("TimeoutError", "OSError", "Exception")),
        ),
        Row(
            "exception",
            "a worker finds its node unfit (ReplaceNodeError)",
            how="error=node",
            outcome=REPLACED,
            seen="ReplaceNodeError with its text",
            answer="The node counts as suspect.",
            sign=Sign(HOST, "exception", error("ReplaceNodeError", "FtError", "Exception")),
        ),
        Row(
            "exception",
            "a worker catches an exception of an unknown kind",
            how="error=software",
            outcome=RESTARTED,
            seen="the exception, with its trace in the worker's log",
            answer="If the same error occurs again at the same step, the run ends, because a restart would lead to "
            "it again.",
            sign=Sign(SOFTWARE, "exception", error("RuntimeError", "Exception", says="a bug")),
        ),
        Row(
            "exception",
            "a worker finds that its input is invalid (UserError)",
            how="error=user",
            outcome=STOPPED,
            seen="the problem and how to fix it; exit code 2",
            sign=Sign(USER, "exception", error("UserError", "FtError", "Exception", says="no")),
        ),
    ),
    "Data in memory": (
        Row(
            "corrupt-tensor",
            "a parameter of a worker becomes NaN",
            how="value=nan",
            outcome=RESTARTED,
            seen="NonFiniteLossError: the loss of a microbatch is nan",
            answer="Snapshots in memory may contain the NaN, so all state is loaded from the checkpoint. If the "
            "checkpoint contains it, too, it recurs at the same step and ends the run.",
            sign=Sign(
                SOFTWARE, "exception", error("NonFiniteLossError", "FtError", says="the loss of a microbatch is nan")
            ),
        ),
        Row(
            "corrupt-tensor",
            "one bit of a worker's parameters flips",
            how="value=bit",
            outcome=UNNOTICED,
            seen="nothing, except perhaps a change in the loss curve",
            answer="The loss differs from then on. Only double execution (DMR) detects the fault.",
        ),
        Row(
            "stale-state",
            "a worker continues with its optimizer shard of an earlier step",
            outcome=UNNOTICED,
            seen="nothing, except perhaps a change in the loss curve",
            answer="The loss differs from then on. No other worker owns the shard, so there is nothing to compare it "
            "with.",
        ),
        Row(
            "bit-flip",
            "one bit flips in the result of an operator, or in a received message",
            how="mode=once",
            outcome=HARMLESS,
            seen="DMR: step, rank, host, device, operator, layer, microbatch, and how many elements differ",
            answer="All ranks repeat the step before its result is used.",
            needs=DMR,
        ),
        Row(
            "bit-flip",
            "results of a worker have a flipped bit repeatedly",
            how="mode=repeat",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="The worker is replaced after --ft-dmr-retries further attempts; the node counts as suspect.",
            sign=Sign(HOST, "exception", error("SuspectError", "ReplaceNodeError", "FtError", "Exception")),
            needs=DMR,
        ),
        Row(
            "bit-flip",
            "a bit is stuck in one unit of a worker's device",
            how="mode=stuck",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="Where the bit happens to be right, nothing differs. Otherwise the outcome is that of repeated "
            "flips.",
            sign=Sign(HOST, "exception", error("SuspectError", "ReplaceNodeError", "FtError", "Exception")),
            needs=DMR,
        ),
        Row(
            "corrupt-snapshot",
            "one byte of a worker's own snapshot flips",
            how="copies=own",
            outcome=HARMLESS,
            seen="nothing; the next recovery reports that the state came from a peer's copy",
            answer="Every snapshot is verified before it is used; a peer's copy is used instead.",
        ),
        Row(
            "corrupt-snapshot",
            "one byte of each copy that a worker holds for peers flips",
            how="copies=peer",
            outcome=HARMLESS,
            seen="nothing; the recovery that would need the copy reports that it is damaged",
            answer="A damaged copy is never used: another peer's copy, an earlier step or the checkpoint is used "
            "instead.",
        ),
        Row(
            "stale-snapshot",
            "a worker has lost the newest copies that it held for peers",
            outcome=HARMLESS,
            seen="nothing; the recovery that would need one repeats one more step",
            answer="Workers report which steps they hold; all return to the newest step of which every rank can get "
            "its state.",
        ),
    ),
}
