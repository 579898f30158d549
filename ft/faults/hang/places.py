"""Says where a thread is, from its Python calls and from what the operating system says of it."""

import re

from ft.faults.hang.look import Rank, Thread

DATA, STORAGE, LOCK, KERNEL, COMMUNICATION, USER = (
    "data loader",
    "storage",
    "lock",
    "kernel or native code",
    "communication",
    "user code",
)

_RULES: tuple[tuple[str, str], ...] = (
    (DATA, r"torch/utils/data/|core/datasets/|/datasets?/|data_loader|dataloader|get_batch|data_iterator"),
    (STORAGE, r"torch/serialization|dist_checkpointing|checkpoint|/storage|shutil\.py|pathlib\.py|fsync|tarfile"),
    (LOCK, r"threading\.py:\d+ (acquire|wait|join|_wait_for_tstate_lock|__enter__)|/lock|filelock|queue\.py:\d+ get"),
    (COMMUNICATION, r"torch/distributed/|ft/state/groups/"),
    (KERNEL, r"torch/cuda/.*(synchronize|query)|torch/_ops\.py"),
)
"""(place, pattern of a call): the first call from the inside that matches a rule says the place."""

_STANDARD = re.compile(r"(^|/)(threading|queue)\.py:")
_OWN_WAITS = re.compile(r"(^|/)ft/(worker/(orders|protocol|session)|state/snapshot/store)\.py:")
"""Calls in which a rank waits for the control plane or for a peer's answer to a snapshot."""

_OF_THE_SYSTEM: tuple[tuple[str, str], ...] = (
    (STORAGE, r"^D\b|nfs|rpc_wait|io_schedule|jbd2|ext4|xfs|fuse|lustre|cl_sync|wait_on_page|blkdev"),
    (LOCK, r"futex|flock|posix_lock|fcntl"),
)
_DEEP = 6
"""Number of innermost calls that are looked at; further out, every thread is in the training loop."""


def place(thread: Thread | None) -> str:
    """Return in which kind of place a thread is: one of the constants of this module."""
    if thread is None or not thread.frames:
        return KERNEL
    for frame in thread.frames[:_DEEP]:
        for found, pattern in _RULES:
            if re.search(pattern, frame):
                return found
    return next((found for found, pattern in _OF_THE_SYSTEM if re.search(pattern, thread.kernel)), USER)


def is_in_own_wait(rank: Rank) -> bool:
    """Return whether the training thread of a rank waits inside this project's code: for an order or a verdict of
    the control plane, or for the peers that take its snapshot. Another process has to act first.
    """
    frames = rank.training.frames if rank.training is not None else ()
    inner = next((frame for frame in frames if not _STANDARD.search(frame)), "")
    return _OWN_WAITS.search(inner) is not None


def where(rank: Rank) -> str:
    """Return as text what the training thread of a rank is doing: the kind of place, its innermost Python call, and the
    kernel function in which it waits. If the threads are unknown, it is the last operation that the rank has started.
    """
    thread = rank.training
    if thread is None and rank.operations:
        last = rank.operations[-1]
        return f"after {last}" + (f", which was started at {last.site}" if last.site else "")
    kind = place(thread)
    if thread is None:
        return kind
    top = thread.frames[0] if thread.frames else ""
    details = [text for text in (top, thread.kernel and f"kernel: {thread.kernel}") if text]
    return f"{kind} ({'; '.join(details)})" if details else kind
