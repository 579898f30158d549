"""Simulate a training run under failures in wall time, from event to event.

The run consists of units: one for a job that stops as a whole, or several replicas (groups, in SPARe) that fail by
themselves. A unit needs all of its nodes. A node that fails goes to repair, a standby takes its place if there is one,
and otherwise the unit waits until a node is repaired. Failures strike at any moment: during steps, saves, restarts,
recoveries and waits. Nodes are numbered; those beyond the ones of the units begin as standbys.

Between two events the run computes at a constant pace, so that its steps and checkpoints are counted in closed form.
The functions take nothing but arrays. Numba compiles them if it is installed; interpreted, they give the same results.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NEVER = 1e30
"""A time in seconds, or a number of steps, that is not reached."""
SPARE, AWAY = -1, -2
"""In ``State.unit_of``: the node is a standby, or in repair."""
NO_MEMORY, COPIES, NEIGHBOURS, ENDS_TOO = range(4)
"""What restores a lost node: nothing in memory, peer copies of snapshots, or these and CheckFree's stages beside a lost
one, which rebuild those in the middle, or the first and the last one, too."""
LOST, HELD, REBUILT = range(3)
"""Whether the state of the lost nodes is in memory: no, yes, or only as an estimate from the stages beside it."""

# Positions in Options.real.
EVERY, SAVE, RESTART, REBUILD, SWAP, STALL, REJOIN, NEIGHBOUR_S, BAD, DETECT, IDLE, PATCH_S = range(12)
# Positions in Options.whole.
UNITS, MEMORY, K, STAGES, RETURNS, LEAST, DROPS = range(7)
# Positions in State.real.
NOW, QUIET, STEPS, SAVING, USEFUL, SAFE, PACE, GAIN, STALLED, STOPPED, WAITED, SAVED, UNDONE, IDLED, DONE = range(15)
# Positions in State.whole.
UP, SPARES, DOWN, ANEW, OPEN, VACANT, HITS, GONE, LUCK, NEXT, READYING, *_COUNTED = range(20)
FAILURES, SWAPS, RESTARTS, REBUILDS, LARGE, LOSSES, STACKS, SWAPPABLE, ENDS = _COUNTED
LARGE_LOSS_S = 3600.0


class RunConstants(NamedTuple):
    """What does not change during a run.

    Attributes:
        real: times in seconds, steps and probabilities: ``EVERY`` steps between checkpoints; ``SAVE``, ``RESTART`` and
            ``REBUILD`` (of one replica) durations; ``SWAP`` of a recovery from memory; ``STALL`` of the other replicas
            at a failure and ``REJOIN`` at a return; ``NEIGHBOUR_S`` of CheckFree's rebuild; ``BAD``, the probability
            that a standby is bad, which takes ``DETECT``; ``IDLE``, failures of a standby relative to those of a busy
            node; ``PATCH_S``, duration of one stack (SPARe).
        whole: ``UNITS``; ``MEMORY``; ``K`` peer copies; ``STAGES`` of the pipeline; ``RETURNS``, whether lost units
            come back before a global restart; ``LEAST`` number of units that train; ``DROPS``, whether the other units
            repeat the interrupted step.
        pace: steps per second with d units lost, [units + 1].
        gain: useful seconds of a step with d units lost, [units + 1].
        patch: probability that the loss after d others needs another stack, [units + 1].
        holders: node position -> positions that hold its copies, flattened [positions * K].
        marks: the ruler of SPARe's placement; empty without SPARe.
    """

    real: np.ndarray
    whole: np.ndarray
    pace: np.ndarray
    gain: np.ndarray
    patch: np.ndarray
    holders: np.ndarray
    marks: np.ndarray


class Events(NamedTuple):
    """All failures of a run, in order, and random numbers.

    Attributes:
        at: times in seconds, the last one ``NEVER``.
        node: a node of the domain that fails.
        taken: number of neighbouring nodes that the failure takes; 0: a process crashes, and no node is lost.
        repair: seconds until the nodes are back.
        luck: uniform random numbers, used in turn.
    """

    at: np.ndarray
    node: np.ndarray
    taken: np.ndarray
    repair: np.ndarray
    luck: np.ndarray


class State(NamedTuple):
    """The state of a run; ``real`` and ``whole`` hold its single numbers.

    Attributes:
        unit_of: node -> its unit, ``SPARE`` or ``AWAY``.
        slot_of: node -> its position in the job.
        spares: stack of standbys. ``spare_at``: node -> its position in that stack.
        away: nodes in repair, as a heap. ``back_at``: when each of them returns, the earliest first.
        vacant: stack of positions without a node.
        up, missing, ready: unit -> whether it trains, nodes that it lacks, when its restart ends.
        gone: positions lost since the last recovery; ``is_gone``: position -> whether it is one of these.
        hits: units that the present failure has struck; ``is_hit``: unit -> number of its nodes that were lost.
        living: shard type -> units that host it and train (SPARe).
    """

    real: np.ndarray
    whole: np.ndarray
    unit_of: np.ndarray
    slot_of: np.ndarray
    spares: np.ndarray
    spare_at: np.ndarray
    away: np.ndarray
    back_at: np.ndarray
    vacant: np.ndarray
    up: np.ndarray
    missing: np.ndarray
    ready: np.ndarray
    gone: np.ndarray
    is_gone: np.ndarray
    hits: np.ndarray
    is_hit: np.ndarray
    living: np.ndarray


def begin(units: int, nodes: int, standbys: int, marks: int) -> State:
    """Return the state at the start: all units train, all other nodes are standbys.

    Args:
        units: number of units.
        nodes: number of nodes of all units.
        standbys: number of standbys.
        marks: number of marks of SPARe's ruler, 0 without SPARe.
    """
    every = nodes + standbys
    whole, real = np.zeros(20, dtype=np.int64), np.zeros(15)
    whole[UP], whole[SPARES], real[SAVING] = units, standbys, -1.0
    owner = np.full(every, SPARE)
    owner[:nodes] = np.arange(nodes) * units // nodes
    spare_at = np.full(every, -1)
    spare_at[nodes:] = np.arange(standbys)
    spares = np.zeros(every, dtype=np.int64)
    spares[:standbys] = np.arange(nodes, every)
    away, (vacant, gone, is_gone) = np.zeros(every, dtype=np.int64), np.zeros((3, nodes), dtype=np.int64)
    missing, hits, is_hit = np.zeros((3, units), dtype=np.int64)
    slots = np.where(np.arange(every) < nodes, np.arange(every), -1)
    return State(
        real, whole, owner, slots, spares, spare_at, away, np.zeros(every), vacant, np.ones(units, dtype=np.int64),
        missing, np.full(units, NEVER), gone, is_gone, hits, is_hit, np.full(units, marks, dtype=np.int64),
    )  # fmt: skip


def play(o: RunConstants, e: Events, s: State, until: np.ndarray, found: np.ndarray) -> None:
    """Simulate up to each of the times ``until``, ascending, and write the totals so far to the rows of ``found``.

    Args:
        o: the run.
        e: its failures.
        s: its state, which changes.
        until: times in seconds.
        found: float [len(until), 15 + 20]: ``State.real`` and ``State.whole`` at each time.
    """
    set_pace(o, s)
    for row in range(len(until)):
        while True:
            which, when = next_event(e, s)
            if when > until[row]:
                break
            advance(o, s, when)
            if which == -1:
                fail(o, e, s, s.whole[NEXT])
                s.whole[NEXT] += 1
            elif which == 0:
                come_back(o, e, s)
            else:
                resume(o, s, which - 1)
        advance(o, s, until[row])
        for i in range(len(s.real)):
            found[row, i] = s.real[i]
        for i in range(len(s.whole)):
            found[row, len(s.real) + i] = s.whole[i]


def next_event(e: Events, s: State) -> tuple[int, float]:
    """Return the next event and its time: -1 for a failure, 0 for a node that returns, or the number of a unit that is
    ready, counted from 1.
    """
    which, when = -1, e.at[s.whole[NEXT]]
    if s.whole[DOWN] and s.back_at[0] <= when:
        which, when = 0, s.back_at[0]
    if s.whole[READYING]:
        for unit in range(len(s.ready)):
            if s.ready[unit] <= when:
                which, when = 1 + unit, s.ready[unit]
    return which, when


def advance(o: RunConstants, s: State, when: float) -> None:
    """Let the run compute until ``when``: waits, steps and checkpoints."""
    x = s.real
    left = when - x[NOW]
    x[IDLED] += left * s.whole[SPARES]
    x[NOW] = when
    if s.whole[UP] < o.whole[LEAST] or s.whole[ANEW]:
        x[WAITED if s.whole[OPEN] else STOPPED] += left
        return
    pause = min(max(x[QUIET] - (when - left), 0.0), left)
    x[STALLED] += pause
    left -= pause
    while left > 0.0:
        if x[SAVING] >= 0.0:
            rest = o.real[SAVE] - x[SAVING]
            x[SAVED] += min(rest, left)
            if left < rest:
                x[SAVING] += left
                return
            left -= rest
            x[SAVING], x[STEPS], x[SAFE] = -1.0, 0.0, x[USEFUL]
        cycles = left // (o.real[EVERY] / x[PACE] + o.real[SAVE]) if x[STEPS] == 0.0 else 0.0
        if cycles >= 1.0:
            x[USEFUL] += cycles * o.real[EVERY] * x[GAIN]
            x[DONE] += cycles * o.real[EVERY]
            x[SAVED] += cycles * o.real[SAVE]
            x[SAFE] = x[USEFUL]
            left = max(0.0, left - cycles * (o.real[EVERY] / x[PACE] + o.real[SAVE]))
        steps = min(left * x[PACE], o.real[EVERY] - x[STEPS])
        left -= steps / x[PACE]
        x[USEFUL] += steps * x[GAIN]
        x[DONE] += steps
        x[STEPS] += steps
        if x[STEPS] >= o.real[EVERY] * (1.0 - 1e-12):
            x[SAVING] = 0.0
        else:
            return


def set_pace(o: RunConstants, s: State) -> None:
    """Note how fast the units that are up train."""
    lost = o.whole[UNITS] - s.whole[UP]
    s.real[PACE], s.real[GAIN] = o.pace[lost], o.gain[lost]


def fail(o: RunConstants, e: Events, s: State, at: int) -> None:
    """Let failure ``at`` strike."""
    node, taken = e.node[at], e.taken[at]
    s.whole[HITS] = 0
    if taken == 0:
        if s.unit_of[node] >= 0 and s.missing[s.unit_of[node]] == 0:
            hit(s, s.unit_of[node], 0)
    else:
        first = node // taken * taken
        for other in range(first, min(first + taken, len(s.unit_of))):
            if s.unit_of[other] == SPARE and luck(e, s) < o.real[IDLE]:
                take_spare(s, other)
                repair(s, other, e.repair[at])
            elif s.unit_of[other] >= 0:
                hit(s, s.unit_of[other], 1)
                vacate(s, other)
                repair(s, other, e.repair[at])
    if s.whole[HITS]:
        s.whole[FAILURES] += 1
        if o.whole[UNITS] == 1:
            stop(o, e, s)
        else:
            lose(o, e, s)


def luck(e: Events, s: State) -> float:
    """Return the next uniform random number."""
    s.whole[LUCK] = (s.whole[LUCK] + 1) % len(e.luck)
    return e.luck[s.whole[LUCK]]


def hit(s: State, unit: int, nodes: int) -> None:
    """Note that the failure has struck a unit, and how many of its nodes it took."""
    for i in range(s.whole[HITS]):
        if s.hits[i] == unit:
            s.is_hit[unit] += nodes
            return
    s.hits[s.whole[HITS]], s.is_hit[unit] = unit, nodes
    s.whole[HITS] += 1


def vacate(s: State, node: int) -> None:
    """Take a node out of its unit."""
    slot, unit = s.slot_of[node], s.unit_of[node]
    s.vacant[s.whole[VACANT]] = slot
    s.whole[VACANT] += 1
    if s.is_gone[slot] == 0:
        s.is_gone[slot] = 1
        s.gone[s.whole[GONE]] = slot
        s.whole[GONE] += 1
    s.missing[unit] += 1
    s.whole[OPEN] += 1


def repair(s: State, node: int, seconds: float) -> None:
    """Send a node to repair."""
    at, when = s.whole[DOWN], s.real[NOW] + seconds
    s.unit_of[node] = AWAY
    s.whole[DOWN] += 1
    while at > 0 and s.back_at[(at - 1) // 2] > when:
        s.away[at], s.back_at[at] = s.away[(at - 1) // 2], s.back_at[(at - 1) // 2]
        at = (at - 1) // 2
    s.away[at], s.back_at[at] = node, when


def repaired(s: State) -> int:
    """Take the node that is repaired first out of repair."""
    node, at, last = s.away[0], 0, s.whole[DOWN] - 1
    s.whole[DOWN] = last
    while 2 * at + 1 < last:
        child = 2 * at + 1
        if child + 1 < last and s.back_at[child + 1] < s.back_at[child]:
            child += 1
        if s.back_at[child] >= s.back_at[last]:
            break
        s.away[at], s.back_at[at] = s.away[child], s.back_at[child]
        at = child
    s.away[at], s.back_at[at] = s.away[last], s.back_at[last]
    return node


def take_spare(s: State, node: int) -> None:
    """Remove a node from the standbys."""
    place, last = s.spare_at[node], s.whole[SPARES] - 1
    s.spares[place] = s.spares[last]
    s.spare_at[s.spares[place]] = place
    s.spare_at[node] = -1
    s.whole[SPARES] = last


def fill(o: RunConstants, e: Events, s: State, unit: int) -> int:
    """Give a unit standbys for the nodes that it lacks, as far as there are any; return how many of them were bad."""
    bad = 0
    while s.missing[unit] > 0 and s.whole[SPARES] > 0:
        node = s.spares[s.whole[SPARES] - 1]
        take_spare(s, node)
        if o.real[BAD] > 0.0 and luck(e, s) < o.real[BAD]:
            bad += 1
            repair(s, node, e.repair[s.whole[LUCK] % len(e.repair)])
            continue
        s.whole[VACANT] -= 1
        s.slot_of[node], s.unit_of[node] = s.vacant[s.whole[VACANT]], unit
        s.missing[unit] -= 1
        s.whole[OPEN] -= 1
    return bad


def come_back(o: RunConstants, e: Events, s: State) -> None:
    """Let a repaired node return, and give it to the unit that lacks the fewest nodes, if a unit waits."""
    node = repaired(s)
    s.unit_of[node], s.spare_at[node] = SPARE, s.whole[SPARES]
    s.spares[s.whole[SPARES]] = node
    s.whole[SPARES] += 1
    if s.whole[OPEN] == 0 or not (o.whole[RETURNS] or s.whole[ANEW]):
        return
    best = -1
    for unit in range(len(s.missing)):
        if s.missing[unit] > 0 and (best < 0 or s.missing[unit] < s.missing[best]):
            best = unit
    bad = fill(o, e, s, best)
    if s.missing[best] == 0:
        start(o, s, best, o.real[RESTART if s.whole[ANEW] else REBUILD], bad)


def forget(s: State) -> None:
    """Note that no position is lost since the last recovery."""
    for i in range(s.whole[GONE]):
        s.is_gone[s.gone[i]] = 0
    s.whole[GONE] = 0


def start(o: RunConstants, s: State, unit: int, seconds: float, bad: int) -> None:
    """Begin the start of a unit whose nodes are complete."""
    if s.ready[unit] == NEVER:
        s.whole[READYING] += 1
    s.ready[unit] = s.real[NOW] + seconds + bad * o.real[DETECT]


def cancel(s: State, unit: int) -> None:
    """End the start of a unit, because it has failed again."""
    if s.ready[unit] != NEVER:
        s.whole[READYING] -= 1
        s.ready[unit] = NEVER


def roll_back(s: State) -> None:
    """Return to the last complete checkpoint; the run starts anew."""
    x = s.real
    lost = x[USEFUL] - x[SAFE]
    x[UNDONE] += lost
    s.whole[LARGE] += lost > LARGE_LOSS_S
    x[USEFUL], x[STEPS], x[SAVING] = x[SAFE], 0.0, -1.0
    s.whole[ANEW] = 1
    s.whole[RESTARTS] += 1


def drop_step(s: State) -> None:
    """Return to the last committed step, which is in memory."""
    x = s.real
    if x[SAVING] >= 0.0:
        x[SAVING] = 0.0
    else:
        part = x[STEPS] - np.floor(x[STEPS])
        x[STEPS] -= part
        x[DONE] -= part
        x[USEFUL] -= part * x[GAIN]


def kept(o: RunConstants, s: State) -> int:
    """Return whether the state of the lost nodes is in memory: ``LOST``, ``HELD`` or ``REBUILT``."""
    copies, answer, slots = o.whole[K], HELD, len(s.is_gone)
    if o.whole[MEMORY] == NO_MEMORY:
        return LOST
    for i in range(s.whole[GONE]):
        slot, held = s.gone[i], False
        for j in range(copies):
            held = held or s.is_gone[o.holders[slot * copies + j]] == 0
        if held:
            continue
        answer = REBUILT
        stage = slot * o.whole[STAGES] // slots
        is_end = stage == 0 or stage == o.whole[STAGES] - 1
        if o.whole[MEMORY] < (ENDS_TOO if is_end else NEIGHBOURS):
            return LOST
        for j in range(s.whole[GONE]):
            other = s.gone[j] * o.whole[STAGES] // slots
            if stage - other == 1 or other - stage == 1:
                return LOST
    return answer


def stop(o: RunConstants, e: Events, s: State) -> None:
    """Let a failure stop the job, which is a single unit, and begin its recovery if its nodes are complete."""
    if s.up[0]:
        s.up[0], s.whole[UP] = 0, 0
        drop_step(s)
    cancel(s, 0)
    bad = fill(o, e, s, 0)
    state = kept(o, s)
    if not s.whole[ANEW] and (state == LOST or s.missing[0] > 0):
        roll_back(s)
    if s.missing[0] > 0:
        return
    if s.whole[ANEW]:
        start(o, s, 0, o.real[RESTART], bad)
    elif state == REBUILT:
        s.whole[REBUILDS] += 1
        start(o, s, 0, o.real[NEIGHBOUR_S], bad)
    else:
        s.whole[SWAPS] += 1
        start(o, s, 0, o.real[SWAP], bad)


def host(o: RunConstants, s: State, unit: int, by: int) -> None:
    """Count one host more (``by`` 1) or less (-1) for the shard types of a unit (SPARe)."""
    for i in range(len(o.marks)):
        kind = (unit + o.marks[i]) % len(s.living)
        s.living[kind] += by
        if by < 0 and s.living[kind] == 0:
            s.whole[ENDS] += 1
        elif by > 0 and s.living[kind] == 1:
            s.whole[ENDS] -= 1


def take_down(o: RunConstants, s: State, unit: int) -> None:
    """Take a unit out of training."""
    s.up[unit] = 0
    s.whole[UP] -= 1
    host(o, s, unit, -1)


def lose(o: RunConstants, e: Events, s: State) -> None:
    """Let a failure take units; the others go on, unless nothing holds the state or a shard type any more."""
    fell = 0
    for i in range(s.whole[HITS]):
        unit = s.hits[i]
        cancel(s, unit)
        if s.up[unit]:
            fell += 1
            s.whole[STACKS] += 1
            pause(o, e, s)
            take_down(o, s, unit)
    if fell and not s.whole[ANEW] and (s.whole[UP] == 0 or s.whole[ENDS] > 0):
        s.whole[LOSSES] += 1
        roll_back(s)
        s.whole[HITS] = len(s.up)
        for unit in range(len(s.up)):
            s.hits[unit] = unit
            if s.up[unit]:
                take_down(o, s, unit)
    if s.whole[ANEW] or o.whole[RETURNS]:
        revive_all(o, e, s)
    forget(s)
    set_pace(o, s)


def pause(o: RunConstants, e: Events, s: State) -> None:
    """Let the other units wait after the loss of one, and repeat or complete the interrupted step."""
    x = s.real
    if s.whole[ANEW]:
        return
    wait = o.real[STALL]
    if o.whole[DROPS]:
        drop_step(s)
    elif luck(e, s) < o.patch[o.whole[UNITS] - s.whole[UP]]:
        wait += o.real[PATCH_S]
    x[QUIET] = max(x[QUIET], x[NOW] + wait) if o.whole[DROPS] else max(x[QUIET], x[NOW]) + wait


def revive_all(o: RunConstants, e: Events, s: State) -> None:
    """Give the units that were struck standbys, those that lack the fewest nodes first."""
    most = 0
    for i in range(s.whole[HITS]):
        most = max(most, s.missing[s.hits[i]])
    for lacking in range(most + 1):
        for i in range(s.whole[HITS]):
            if s.missing[s.hits[i]] == lacking:
                revive(o, e, s, s.hits[i])


def revive(o: RunConstants, e: Events, s: State, unit: int) -> None:
    """Give a lost unit standbys, and begin its restart if its nodes are complete."""
    if s.ready[unit] != NEVER:  # it has begun, with the state of units that are lost now
        s.ready[unit] = max(s.ready[unit], s.real[NOW] + o.real[RESTART])
        return
    whole_before = s.missing[unit]
    bad = fill(o, e, s, unit)
    if s.missing[unit] > 0:
        return
    small = o.whole[MEMORY] != NO_MEMORY and s.is_hit[unit] <= 1 and whole_before <= 1
    if s.whole[ANEW]:
        start(o, s, unit, o.real[RESTART], bad)
    elif small:
        s.whole[SWAPS] += 1
        start(o, s, unit, o.real[SWAP], bad)
    else:
        start(o, s, unit, o.real[REBUILD], bad)


def resume(o: RunConstants, s: State, unit: int) -> None:
    """Let a unit that is ready train."""
    cancel(s, unit)
    s.up[unit] = 1
    s.whole[UP] += 1
    host(o, s, unit, 1)
    if o.whole[UNITS] == 1:
        forget(s)
    if s.whole[ANEW]:
        if s.whole[ENDS] == 0 and (o.whole[RETURNS] or s.whole[UP] == o.whole[UNITS]):
            s.whole[ANEW] = 0
    else:
        s.real[QUIET] = max(s.real[QUIET], s.real[NOW] + o.real[REJOIN])
    set_pace(o, s)


@cache
def player() -> tuple[str, Callable[..., Any]]:
    """Return ("numba", the compiled :func:`play`), or ("interpreted", :func:`play`) where numba is not installed."""
    try:
        import numba
        from numba.extending import register_jitable
    except ImportError:
        return "interpreted", play
    module = sys.modules[__name__]
    options = {"_nrt": False}  # all arrays belong to the caller
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == __name__ and name not in ("begin", "player", "play"):
            register_jitable(**options)(function)
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(Path(before or Path.home() / ".cache" / "megatron-ft") / f"goodput-{digest}")
        compiled = numba.njit(cache=True, **options)(play)
    except (RuntimeError, OSError):  # no cache folder is writable
        compiled = numba.njit(**options)(play)
    finally:
        numba.config.CACHE_DIR = before
    return "numba", compiled
