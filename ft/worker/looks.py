"""What this worker is doing at one moment, for the search for the cause of a hang (order ``Look``).

It is called on the thread that receives orders, so it also answers when the training thread is blocked.
"""

import dataclasses
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ft.faults.hang.format import COMMUNICATION, KERNEL, place
from ft.faults.hang.look import Across, Operation, Rank, Thread
from ft.job.messages import Look, Looked
from ft.net.codec import to_json
from ft.platform import processes
from ft.state.groups.history import shortened

if TYPE_CHECKING:
    from ft.worker.session import Session

_MOST_FRAMES = 40


@dataclass(frozen=True)
class Outside:
    """What a rank does with ranks of other replicas.

    Attributes:
        operations: its operations with them that have not ended, and the last one of each channel.
        counts: number of operations with them that it has started, by channel.
        groups: name of a group of ranks of several replicas -> its members.
        threads: names of the threads that the training thread waits for.
    """

    operations: tuple[Operation, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, Across] = field(default_factory=dict)
    threads: frozenset[str] = frozenset()


def answer(session: "Session", order: Look) -> Looked:
    """Return the answer to a look."""
    outside = session.outside() if session.outside is not None else Outside()
    groups = session.groups.look(outside.threads) if session.groups is not None else None
    threads = running_threads()
    operations = groups.operations if groups is not None else ()
    trainer = next((thread for thread in threads if thread.trains), None)
    # A device carries operations out on its own. Only if its host waits, too, does the rank wait for them.
    is_blocked = (groups is not None and groups.blocked) or any(one.awaited for one in outside.operations)
    if groups is not None and not is_blocked and place(trainer) not in (COMMUNICATION, KERNEL):
        operations = tuple(dataclasses.replace(one, awaited=False) for one in operations)
    said = Rank(
        rank=session.rank,
        worker=session.worker,
        node=session.node,
        ended=session.progress.doing == "idle" and session.progress.place == "done",
        step=session.progress.step,
        counts={**(groups.counts if groups is not None else {}), **outside.counts},
        operations=(*operations, *outside.operations),
        departure=groups.departure if groups is not None else None,
        threads=tuple(threads),
        step_s=session.progress.step_time(),
    )
    members = dict(groups.members) if groups is not None else {}
    return Looked(session.worker, order.number, to_json(said), members, dict(outside.groups))


def running_threads() -> list[Thread]:
    """Return all Python threads of this process with their calls, the main thread first, without the calling one."""
    states = {task: state for _, task, state in processes.tasks(os.getpid())}
    frames, found = sys._current_frames(), []
    for thread in sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread()):
        if thread is threading.current_thread() or thread.ident not in frames:
            continue
        # No line of source is read: the storage may be what hangs.
        stack = itertools.islice(traceback.walk_stack(frames[thread.ident]), _MOST_FRAMES)
        calls = tuple(f"{shortened(f.f_code.co_filename)}:{line} {f.f_code.co_name}" for f, line in stack)
        kernel = states.get(thread.native_id or 0, "")
        found.append(Thread(thread.name, calls, thread is threading.main_thread(), kernel))
    return found
