"""Failure detection in a node agent of ``ft run``: finds workers that send no heartbeats, as a pure function.

A worker (training process) is silent if its last heartbeat is older than a limit. A worker attaches by connecting to
its agent and reporting that it is ready; only then does it send heartbeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds without a heartbeat after which a worker counts as silent.

    Attributes:
        stopped_s: limit for a stopped process (state T), which only a signal can continue.
        silent_s: limit in all other cases.
        unsettled_s: limit before the end of the first step: until then imports, compilation and the first allocations
            may hold the interpreter lock for long.
        mute_s: limit for a worker that has never attached and whose process shows no activity at all, while other
            workers have attached and wait for it.
    """

    stopped_s: float = 0.25
    silent_s: float = 1.0
    unsettled_s: float = 30.0
    mute_s: float = 50.0


@dataclass(frozen=True)
class Watch:
    """Observations of one attached worker.

    Attributes:
        beat_at: time of the last heartbeat, in seconds.
        state: state letter of the worker's process in /proc.
        settled: whether the worker has finished a step.
    """

    beat_at: float
    state: str
    settled: bool


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


def silent(now: float, watches: Mapping[str, Watch], limits: Limits) -> list[Silence]:
    """Return the workers that are silent at ``now``.

    Args:
        now: the present time, in seconds of the same clock as ``Watch.beat_at``.
        watches: name of a worker -> observations of it.
        limits: seconds after which a worker counts as silent.
    """
    found = []
    for worker, watch in watches.items():
        quiet = now - watch.beat_at
        limit = limits.silent_s if watch.settled else limits.unsettled_s
        if watch.state in "Tt" and quiet > limits.stopped_s:
            found.append(
                Silence(worker, quiet, watch.state, f"its process is stopped and sent no beat for {quiet:.2f} s")
            )
        elif quiet > limit:
            found.append(Silence(worker, quiet, watch.state, f"no beat for {quiet:.2f} s (limit {limit:g} s)"))
    return found
