"""Failure detection by heartbeats: which workers are silent, as a pure function of heartbeats and process states."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds without a heartbeat after which a worker counts as silent.

    Attributes:
        stopped_s: limit for a stopped process (state T), which only a signal can continue.
        silent_s: limit in all other cases.
        unsettled_s: limit before the first step has ended, when imports, compilation and the first allocations may hold
            the interpreter lock for long.
        mute_s: limit for a worker that has never attached and does nothing at all, while others have attached and wait
            for it.
    """

    stopped_s: float = 0.25
    silent_s: float = 1.0
    unsettled_s: float = 30.0
    mute_s: float = 50.0


@dataclass(frozen=True)
class Watch:
    """What is known of one attached worker.

    Attributes:
        beat_at: time of its last heartbeat.
        state: state letter of its process in /proc.
        settled: it has finished a step.
    """

    beat_at: float
    state: str
    settled: bool


@dataclass(frozen=True)
class Silence:
    """A worker that is silent, for how many seconds, in which process state, and why that counts as silence."""

    worker: str
    silent_s: float
    state: str
    reason: str


def silent(now: float, watches: Mapping[str, Watch], limits: Limits) -> list[Silence]:
    """Return the workers that are silent at ``now``.

    Args:
        now: the present time, on the clock of the heartbeats' times.
        watches: worker -> what is known of it.
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
