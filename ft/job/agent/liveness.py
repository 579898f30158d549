"""Failure detection in a node agent of ``ft run``: finds workers that send no heartbeats, as a pure function.

A worker (training process) is silent if its last heartbeat is older than a limit. A worker attaches by connecting to
its agent and reporting that it is ready; only then does it send heartbeats.

Heartbeats come from a Python thread, so missing ones have two causes. If the process is stopped, the kernel says so,
and the worker is silent at once. Otherwise one of its threads most likely holds the interpreter lock, in a garbage
collection, an import or a compilation, and the process will go on: the limit is then longer than any of these takes. A
worker that hangs with the lock held delays the others, and is found by that (``ft.job.control.liveness.stalled``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ft.job.control.timeouts import Timeouts


@dataclass(frozen=True)
class Watch:
    """Observations of one attached worker.

    Attributes:
        beat_at: time of the last heartbeat, in seconds.
        state: state letter of the worker's process in /proc.
    """

    beat_at: float
    state: str


@dataclass(frozen=True)
class Silence:
    """One silent worker.

    Attributes:
        worker: name of the worker.
        silent_s: seconds since the last heartbeat.
        state: state letter of the worker's process in /proc.
        reason: explanation for the log.
    """

    worker: str
    silent_s: float
    state: str
    reason: str


def silent(now: float, watches: Mapping[str, Watch], timeouts: Timeouts) -> list[Silence]:
    """Return the workers that are silent at ``now``.

    Args:
        now: the present time, in seconds of the same clock as ``Watch.beat_at``.
        watches: name of a worker -> observations of it.
        timeouts: timeouts of the run.
    """
    found = []
    for worker, watch in watches.items():
        quiet = now - watch.beat_at
        if watch.state in "Tt" and quiet > timeouts.stopped_s:
            reason = f"its process is stopped and sent no beat for {quiet:.2f} s"
            found.append(Silence(worker, quiet, watch.state, reason))
        elif quiet > timeouts.silent_s:
            reason = f"no beat for {quiet:.2f} s (limit {timeouts.silent_s:g} s)"
            found.append(Silence(worker, quiet, watch.state, reason))
    return found
