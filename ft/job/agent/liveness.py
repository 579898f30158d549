"""Who is silent: a pure function of the beats and the process states."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds without a beat after which a worker counts as silent.

    Attributes:
        stopped_s: when its process is stopped (state T): nothing but a signal continues it.
        silent_s: otherwise. unsettled_s: before its first step has ended, when imports, compilation and the first
            allocations may hold the interpreter for long. mute_s: for a worker that has not attached, does nothing at
            all, and keeps others waiting that have.
    """

    stopped_s: float = 0.25
    silent_s: float = 1.0
    unsettled_s: float = 30.0
    mute_s: float = 50.0


@dataclass(frozen=True)
class Watch:
    """What is known of one attached worker.

    ``beat_at``: when its last beat came; ``state``: its letter in /proc; ``settled``: it has done a step.
    """

    beat_at: float
    state: str
    settled: bool


@dataclass(frozen=True)
class Silence:
    """A worker that is silent, for how long, in which process state, and why that counts."""

    worker: str
    silent_s: float
    state: str
    reason: str


def silent(now: float, watches: Mapping[str, Watch], limits: Limits) -> list[Silence]:
    """Who is silent at ``now`` and why.

    Args:
        watches: worker -> what is known of it. Times are on the clock of ``now``.
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
