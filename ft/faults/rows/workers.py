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
            "a worker ends with exit code 1 without a word",
            outcome=RESTARTED,
            seen="exited with code 1, with the last lines of its log",
            sign=Sign(SOFTWARE, "exit 1", ended(1)),
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
            seen=f"{SILENT} 0.3 s, its process is stopped",
            sign=Sign(HOST, "hang", partial(verdict.of_silence, 0.3, "T")),
        ),
        Row(
            "gil",
            "a C call in a worker keeps Python's interpreter lock and does not return",
            outcome=REPLACED,
            seen=f"{SILENT} 1.0 s, its process is alive but silent; where its threads are is in its log",
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
            "nothing that a worker writes finds room for a while",
            outcome=HARMLESS,
            seen="that the checkpoint was not saved, by which rank and why",
            answer="The save is given up as a whole, older checkpoints stay, the next one is tried when it is due. "
            "Lines of the worker's log are left out, those of the metrics file wait in memory. Which are lost for "
            "good is said at the end, and by `ft status` and `ft report`.",
        ),
        Row(
            "io-error",
            "a worker's read fails in the kernel (EIO)",
            outcome=REPLACED,
            seen="OSError: Input/output error",
            answer="The node counts as suspect: standbys of other nodes come first, and no further worker is "
            "started there while there is another node.",
            sign=Sign(NETWORK, "exception", error("OSError", "Exception", says="[Errno 5] Input/output error")),
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
                error("RuntimeError", "Exception", says="CUDA error: no CUDA-capable device is detected"),
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
                error("AcceleratorError", "RuntimeError", says="CUDA error: device-side assert triggered"),
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
            sign=Sign(TRANSIENT, "exception", error("RecoverableError", "FtError", "Exception")),
        ),
        Row(
            "exception",
            "an operation of a worker runs into its time limit",
            how="error=timeout",
            outcome=IN_PLACE,
            seen="TimeoutError with its text",
            answer="As any transient fault: the third time the worker is replaced.",
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
            "a worker catches what nothing is known about",
            how="error=software",
            outcome=RESTARTED,
            seen="the exception, with its trace in the worker's log",
            answer="The same error again at the same step ends the run: a restart leads there again.",
            sign=Sign(SOFTWARE, "exception", error("RuntimeError", "Exception", says="a bug")),
        ),
        Row(
            "exception",
            "a worker finds that its input cannot work (UserError)",
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
            answer="What is in memory may have it already, so all state comes from the checkpoint. One that is in the "
            "checkpoint too comes back at the same step, and ends the run.",
            sign=Sign(
                SOFTWARE, "exception", error("NonFiniteLossError", "FtError", says="the loss of a microbatch is nan")
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
            sign=Sign(HOST, "exception", error("SuspectError", "ReplaceNodeError", "FtError", "Exception")),
            needs=DMR,
        ),
        Row(
            "bit-flip",
            "a bit is stuck in one unit of a worker's device",
            how="mode=stuck",
            outcome=REPLACED,
            seen="DMR: rank N is suspected of computing wrongly",
            answer="Where the bit happens to be right nothing differs. Otherwise as for flips again and again.",
            sign=Sign(HOST, "exception", error("SuspectError", "ReplaceNodeError", "FtError", "Exception")),
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
}
