"""What protects a run, and what it costs: every protection, simulated with the best settings that it has.

What follows a failure is asked of the control plane's own decision (:mod:`ft.job.control.recovery`), where copies lie
is asked of its placement, and how far SPARe's groups survive of its controller.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from scipy import special

from ft.job.control import recovery
from ft.job.control.recovery import decide
from ft.lab.plan.goodput import engine
from ft.lab.plan.goodput.scenario import CHECKPOINTS, FEWER, Scenario
from ft.lab.plan.situations import CHECKFREE, CHECKFREE_PLUS, situations
from ft.lab.plan.situations import HOT_SWAP as LADDER_HOT_SWAP
from ft.lab.plan.situations import JobAfterFault as Fault
from ft.lab.plan.snapshot import MAIN, MOMENTS
from ft.protection.table import CONFLICTS, DOUBLE, HOT_SWAP, REPLICAS, STACKS, STAGES, SWAPPED, TABLE
from ft.state.placement.assign import place
from ft.systems.spare.controller.controller import Controller
from ft.systems.spare.placement import Placement
from ft.systems.spare.ruler import largest_redundancy, ruler

_SEARCH, _FINAL = {"numba": 4000, "interpreted": 400}, {"numba": 60_000, "interpreted": 4000}
_ERROR = 0.0008
_PLACED = 16_384
_RUNS = 20_000
"""Runs of the length that is asked about whose spread is the 95 % range."""
STATE = MAIN + MOMENTS["adam"]
"""Bytes of main weights and optimizer state of a parameter."""
STATE_BYTES = STATE + 6
"""The same with the 16-bit weights and 32-bit gradients."""
JUMP, MADE_GOOD, ABOVE, EXPONENT, SLOWDOWN = 0.0141, 500.0, 0.949, 0.28, 0.056
"""CheckFree's cost of a rebuild: the loss jumps by ``JUMP``, which shrinks to 1/e in ``MADE_GOOD`` steps, on a power
law of the loss with ``EXPONENT`` that is ``ABOVE`` its limit; CheckFree+ needs ``SLOWDOWN`` more steps. JUMP and
SLOWDOWN are fitted to two cells of CheckFree's table 2 (10 % an hour)."""
COPIED = 0.035
"""Jump of the loss when CheckFree+ copies the first or last stage from its neighbour, as a part of ``JUMP``. On a small
model the jumps were 0.03-0.10 after swap training, and 1.6-2.1 without."""


@dataclass(frozen=True)
class ProtectionChoice:
    """What a row of the table buys.

    Attributes:
        names: names of the protections in :data:`ft.protection.table.TABLE`, or ``CHECKPOINTS`` or ``FEWER`` alone.
        units: replicas of the model, or groups of SPARe; 1: the job stops as a whole.
        copies: peer copies of each snapshot.
        redundancy: hosts of each shard type (SPARe), or 0.
        returns: whether lost groups return before a global restart.
        twice: share of the steps that DMR executes twice, and so of the silent corruptions that it finds.
    """

    names: tuple[str, ...]
    units: int = 1
    copies: int = 0
    redundancy: int = 0
    returns: bool = True
    twice: float = 0.0

    @property
    def title(self) -> str:
        """Return the name of the row."""
        parts = [name for name in self.names if name not in (STACKS, STAGES, SWAPPED, DOUBLE)] or [CHECKPOINTS]
        if STACKS in self.names:
            parts[parts.index(REPLICAS)] = f"SPARe r={self.redundancy}" + ("" if self.returns else ", none returns")
        elif self.units > 1:
            parts[0 if len(parts) == 1 else parts.index(REPLICAS)] = f"{self.units} {parts[-1]}"
        if STAGES in self.names:
            parts.append("CheckFree+" if SWAPPED in self.names else "CheckFree")
        if HOT_SWAP in parts and self.copies != 1:
            parts[parts.index(HOT_SWAP)] = f"{HOT_SWAP} k={self.copies}"
        if DOUBLE in self.names:
            parts.append("DMR" if self.twice >= 1.0 else f"DMR sampled {self.twice:.0%}")
        return " + ".join(parts)


@dataclass(frozen=True)
class Row:
    """One row: a protection with its settings, and what the simulation found.

    Attributes:
        protection: what protects the run.
        spares: standby nodes.
        interval: steps between checkpoints.
        effective: useful share of the wall time, its mean; ``low`` and ``high`` hold 95 % of runs of that length.
        error: standard error of ``effective``.
        paid: paid GPU hours per useful GPU hour.
        shares: where the rest of the time goes: name -> share of the wall time.
        idle_gpus: mean number of standby GPUs that have nothing to do.
        hour_lost: share of runs that lose more than an hour of computing at once.
        totals: counts of the simulation: failures, swaps, restarts, rebuilds, losses, steps, seconds, and how many of
            these are spent waiting for nodes.
        levels: what happens -> level of the ladder that follows, by the control plane.
    """

    protection: ProtectionChoice
    spares: int
    interval: int
    effective: float
    low: float
    high: float
    error: float
    paid: float
    shares: dict[str, float]
    idle_gpus: float
    hour_lost: float
    totals: dict[str, float]
    levels: dict[str, str] = field(default_factory=dict)

    def days(self, asked: Scenario) -> float:
        """Return the days that the run takes."""
        return asked.days / self.effective if self.effective > 0 else math.inf

    def money(self, asked: Scenario) -> float | None:
        """Return what all GPU hours of the run cost, or None without a price."""
        price = asked.price_per_gpu_hour
        return (
            None
            if price is None
            else price * 24.0 * self.days(asked) * (asked.gpus + self.spares * asked.gpus_per_node)
        )

    def memory(self, asked: Scenario) -> float:
        """Return the bytes of host memory of a node for snapshots and copies, two steps of each."""
        nodes = asked.nodes / self.protection.units
        has = HOT_SWAP in self.protection.names
        return 2.0 * (1 + self.protection.copies) * STATE * asked.params / nodes if has else 0.0

    def network(self, asked: Scenario) -> float:
        """Return the bytes per second that a node sends for copies."""
        nodes = asked.nodes / self.protection.units
        return self.protection.copies * STATE * asked.params / nodes / asked.step_time


def allowed() -> Iterator[tuple[str, ...]]:
    """Yield every combination of protections that the table of protections allows, apart from profiles."""
    entries = [entry for entry in TABLE if entry.name in (HOT_SWAP, REPLICAS, STACKS, STAGES, SWAPPED, DOUBLE)]
    for chosen in product((False, True), repeat=len(entries)):
        names = {entry.name for entry, is_in in zip(entries, chosen, strict=True) if is_in}
        if any(not set(entry.needs) <= names for entry in entries if entry.name in names):
            continue
        if not any(c.one in names and c.other in names for c in CONFLICTS):
            yield tuple(entry.name for entry in entries if entry.name in names)


@cache
def follows(names: tuple[str, ...]) -> dict[str, str]:
    """Return what the control plane does: name of a fault -> level of the recovery ladder."""
    protect = [LADDER_HOT_SWAP] * (HOT_SWAP in names)
    protect += [CHECKFREE_PLUS if SWAPPED in names else CHECKFREE] * (STAGES in names)
    replicas, redundancy = 8 if REPLICAS in names else 1, 2 if STACKS in names else 0
    base = Fault(dp=2, pp=4, peers=1 if HOT_SWAP in names else 0, replicas=replicas, spare_redundancy=redundancy,
                 protect=tuple(protect), checkpoint=50, room=0)  # fmt: skip
    one, pair = frozenset({2}), frozenset({2, 3})
    cases = {
        "a process crashes": replace(base, room=1, lost={0: one}),
        "a node is lost, a standby is there": replace(base, standbys=1, lost={0: one}),
        "a node is lost, no standby is there": replace(base, lost={0: one}),
        "a node and all copies are lost": replace(base, standbys=2, lost={0: pair}),
    }
    return {what: decide(situations(case)[0]).level for what, case in cases.items()}


def replica_gpus(asked: Scenario) -> int:
    """Return the fewest GPUs that hold a replica of the model, with optimizer state, in whole nodes."""
    if asked.replica_gpus:
        return asked.replica_gpus
    needed = asked.params * STATE_BYTES / 40e9
    return max(asked.gpus_per_node, 2 ** math.ceil(math.log2(max(1.0, needed))))


def units_of(asked: Scenario, least: int = 2, most: int = 64) -> list[int]:
    """Return the numbers of replicas into which whole nodes can be divided, each large enough for the model."""
    if asked.replicas:
        return [asked.replicas] if least <= asked.replicas <= 20_000 else []
    nodes, each = asked.nodes, -(-replica_gpus(asked) // asked.gpus_per_node)
    return [n for n in range(least, min(most, nodes // each) + 1) if nodes % n == 0]


def candidates(asked: Scenario, names: tuple[str, ...]) -> list[ProtectionChoice]:
    """Return the settings of a combination of protections that are tried."""
    names = names or (CHECKPOINTS,)
    if STAGES in names and asked.nodes < asked.stages:
        return []  # a node holds stages beside each other, which no others can rebuild
    copies = (0, 1) if STAGES in names else (1, 2, 3) if HOT_SWAP in names else (0,)
    copies = tuple(k for k in copies if k < asked.nodes)
    if STACKS in names:
        found = []
        for units in _thinned(units_of(asked, 8, 1000), 2):
            most = min(largest_redundancy(units), 12)
            found += [
                ProtectionChoice(names, units, 1 if HOT_SWAP in names else 0, r, returns)
                for r in (2, 3, 4, 6, 9, 12)
                if r <= most
                for returns in ((True,) if HOT_SWAP in names else (True, False))
            ]
        return found
    if REPLICAS in names or FEWER in names:
        chosen = _thinned(units_of(asked), 5)
        return [ProtectionChoice(names, units, 1 if HOT_SWAP in names else 0) for units in chosen]
    return [ProtectionChoice(names, 1, k) for k in copies]


def _thinned(numbers: Sequence[int], most: int) -> list[int]:
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most)]


@cache
def controlled(groups: int, redundancy: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (mean stack S, share of losses that need a patch compute) after d losses, by SPARe's controller.

    After more losses than any trial endured, the values of the last one are repeated.
    """
    controller = Controller(Placement(groups, ruler(groups, redundancy)), None)
    rng, sums = np.random.default_rng(groups * 64 + redundancy), np.zeros((3, groups + 1))
    sums[0, 0], sums[1, 0] = 1.0, 1.0
    for _ in range(max(8, 1600 // groups)):
        controller.reset()
        for lost, group in enumerate(rng.permutation(groups)):
            found = controller.lose([int(group)])
            if found.wipe_out:
                break
            sums[0, lost + 1] += 1.0
            sums[1, lost + 1] += found.stack
            sums[2, lost] += bool(found.patch_types)
    last = int(np.flatnonzero(sums[0])[-1])
    stack, patch = np.ones(groups + 1), np.zeros(groups + 1)
    stack[: last + 1], patch[: last + 1] = sums[1, : last + 1] / sums[0, : last + 1], sums[2, : last + 1]
    patch[: last + 1] /= sums[0, : last + 1]
    stack[last + 1 :] = stack[last]
    return stack, patch


@cache
def _holders(nodes: int, copies: int, per_rack: int, replicas: int) -> np.ndarray:
    """Return the positions that hold the copies of each node's state, flattened, by the production placement."""
    if not copies:
        return np.zeros(0, dtype=np.int64)
    if nodes > _PLACED:  # the placement repeats itself
        blocks = np.arange(-(-nodes // _PLACED))[:, None] * _PLACED
        return ((blocks + _holders(_PLACED, copies, per_rack, replicas)).ravel() % nodes)[: nodes * copies]
    where = {i: {"node": f"n{i}"} | ({"rack": f"r{i // per_rack}"} if per_rack else {}) for i in range(nodes)}
    stride = max(1, nodes // replicas)
    held = place(where, [list(range(first, nodes, stride)) for first in range(stride)], copies)
    return np.array([held[i] for i in range(nodes)], dtype=np.int64).ravel()


def options(asked: Scenario, protection: ProtectionChoice, interval: float) -> engine.RunConstants:
    """Return the run for the engine."""
    names, units = protection.names, protection.units
    real, whole = np.zeros(12), np.zeros(7, dtype=np.int64)
    real[engine.EVERY], real[engine.SAVE], real[engine.RESTART] = interval, asked.save_time, asked.restart_time
    real[engine.REBUILD], real[engine.SWAP] = asked.restart_time, asked.swap_time
    real[engine.STALL] = asked.shrink_time if STACKS in names else asked.stall_time
    real[engine.REJOIN], real[engine.NEIGHBOUR_S] = asked.rejoin_time, asked.neighbour_time
    real[engine.BAD], real[engine.DETECT], real[engine.IDLE] = asked.bad_spares, asked.swap_time, asked.idle_failures
    slow = (1.0 + asked.dmr_overhead * protection.twice) * (1.0 + asked.snapshot_overhead * (HOT_SWAP in names))
    step = asked.step_time * slow
    whole[engine.UNITS], whole[engine.STAGES], whole[engine.LEAST] = units, asked.stages, 1
    whole[engine.RETURNS], whole[engine.DROPS] = protection.returns, STACKS not in names
    after = follows(tuple(name for name in names if name not in (CHECKPOINTS, FEWER)))
    in_memory = after["a node is lost, a standby is there"] in (recovery.STANDBY, recovery.CHECKFREE)
    rebuilds = STAGES in names and (units == 1)
    neighbours = engine.ENDS_TOO if SWAPPED in names else engine.NEIGHBOURS
    whole[engine.MEMORY] = neighbours if rebuilds else engine.COPIES if in_memory else engine.NO_MEMORY
    whole[engine.K] = protection.copies
    lost = np.arange(units + 1)
    pace, gain, patch = np.full(units + 1, 1.0 / step), np.full(units + 1, asked.step_time), np.zeros(units + 1)
    marks = np.zeros(0, dtype=np.int64)
    if STACKS in names:
        stack, patch = controlled(units, protection.redundancy)
        pace = 1.0 / (step * (stack * (1.0 - asked.reduce_share) + asked.reduce_share))
        marks = np.array(ruler(units, protection.redundancy), dtype=np.int64)
        real[engine.PATCH_S] = step * (1.0 - asked.reduce_share)
    elif FEWER in names:
        pace = pace * (units - lost) / units
        pace[-1] = pace[0]
    else:
        gain = gain * (units - lost) / units
    holders = _holders(asked.nodes, protection.copies, asked.nodes_per_rack or 0, 8) if units == 1 else marks[:0]
    return engine.RunConstants(real, whole, pace, gain, patch, holders, marks)


@cache
def _drawn(seed: int, size: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([seed, size])
    return rng.random(size), rng.random(size), rng.random(size), rng.random(size), rng.random(8192)


def events(asked: Scenario, standbys: int, failures: int) -> engine.Events:
    """Return failures of all nodes, standbys included; those that find a node away have no effect."""
    every = asked.nodes + standbys
    rates = np.array([cause.rate(every) for cause in asked.causes])
    total = rates.sum()
    first, second, third, fourth, luck = _drawn(asked.seed, failures)
    which = np.searchsorted(np.cumsum(rates) / total, first, side="right").clip(0, len(rates) - 1)
    if asked.trace is not None:
        at, which = _replayed(asked, every, failures)
    else:
        at = np.cumsum(_between(asked, second) / total)
    taken = np.array([cause.taken for cause in asked.causes], dtype=np.int64)[which]
    repair = np.array([cause.repair_s for cause in asked.causes])[which]
    repair = repair * _spread(asked.repair_law, fourth)
    domains = -(-every // np.maximum(taken, 1))
    nodes = np.minimum((third * domains).astype(np.int64), domains - 1) * np.maximum(taken, 1)
    pad = np.zeros(1, dtype=np.int64)
    return engine.Events(
        np.append(at, engine.NEVER), np.append(nodes, pad), np.append(taken, pad), np.append(repair, 0.0), luck
    )


def _between(asked: Scenario, uniform: np.ndarray) -> np.ndarray:
    """Return times between failures with mean 1, from uniform numbers."""
    if asked.law == "periodic":
        return np.ones(len(uniform))
    if asked.law == "weibull":
        return (-np.log1p(-uniform)) ** (1.0 / asked.shape) / math.gamma(1.0 + 1.0 / asked.shape)
    if asked.law == "lognormal":
        return np.exp(asked.shape * special.ndtri(uniform.clip(1e-12, 1 - 1e-12)) - asked.shape**2 / 2)
    return -np.log1p(-uniform)


def _spread(law: str, uniform: np.ndarray) -> np.ndarray:
    """Return factors with mean 1 for the times of repairs."""
    if law == "fixed":
        return np.ones(len(uniform))
    if law == "lognormal":
        return np.exp(special.ndtri(uniform.clip(1e-12, 1 - 1e-12)) - 0.5)
    return -np.log1p(-uniform)


def _replayed(asked: Scenario, nodes: int, failures: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the recorded failures, repeated, in a time that is scaled to the number of nodes."""
    history = asked.trace
    scale = history.gpus / (nodes * asked.gpus_per_node)
    times = np.array([when for when, _ in history.times]) * scale
    causes = [cause.name for cause in asked.causes]
    which = np.array([causes.index(f"{kind} ({history.name})") for _, kind in history.times])
    rounds = -(-failures // len(times))
    at = (times[None, :] + np.arange(rounds)[:, None] * history.hours * 3600.0 * scale).ravel()[:failures]
    return at, np.tile(which, rounds)[:failures]


def simulate(asked: Scenario, protection: ProtectionChoice, standbys: int, interval: float, failures: int) -> Row:
    """Simulate about ``failures`` failures of the run, or up to 25 times as many if repairs take long."""
    repair = max(cause.repair_s for cause in asked.causes)
    failures = max(failures, min(25 * failures, math.ceil(20.0 * repair / asked.mtbf_s)))
    given = options(asked, protection, interval)
    happen = events(asked, standbys, failures)
    state = engine.begin(protection.units, asked.nodes, standbys, len(given.marks))
    end = float(happen.at[-2])
    warm = min(0.3 * end, 5.0 * repair)
    length = asked.days * 86400.0
    count = int(min(_RUNS, (end - warm) / length)) if end - warm >= 20 * length else 20
    span = length if end - warm >= 20 * length else (end - warm) / count
    until = np.append(warm + np.arange(count + 1) * span, end)
    found = np.zeros((count + 2, len(state.real) + len(state.whole)))
    engine.player()[1](given, happen, state, until, found)
    return _row(asked, protection, standbys, interval, until, found)


def _row(asked, protection, standbys, interval, until, found) -> Row:
    """Return the row of the totals at the ends of consecutive parts of the simulated time.

    Args:
        asked, protection, standbys, interval: as for :func:`simulate`.
        until: ends of the parts in seconds, [parts + 2]; the parts have one length, apart from the last.
        found: totals at these times, as :func:`ft.lab.plan.goodput.engine.play` writes them.
    """
    shift, span, total = 15, until[1] - until[0], until[-1] - until[0]
    portion = span / (asked.days * 86400.0)
    every, parts = found[-1] - found[0], np.diff(found[:-1], axis=0)
    whole = every / total
    factor = trusted = 1.0
    if STAGES in protection.names and whole[engine.DONE] > 0 and protection.units == 1:
        factor = converges(
            whole[shift + engine.REBUILDS] / whole[engine.DONE], asked.stages, SWAPPED in protection.names
        )
    exact, waited = waits(asked, standbys) if protection.units == 1 else None, float(whole[engine.WAITED])
    if exact is not None and waited < 0.999:
        trusted = (1.0 - exact) / (1.0 - waited)
    factor *= trusted
    share = parts[:, engine.USEFUL] / span * factor
    mean = float(whole[engine.USEFUL]) * factor
    narrower = math.sqrt(portion) if portion < 1.0 else 1.0
    low, high = (mean + (float(end) - mean) * narrower for end in np.quantile(share, (0.025, 0.975)))
    paid = (1.0 + standbys / asked.nodes) / mean if mean > 0 else math.inf
    names = {"stalled": engine.STALLED, "recovering": engine.STOPPED, "waiting for nodes": engine.WAITED}
    names |= {"saving": engine.SAVED}
    shares = {name: float(whole[at]) * trusted for name, at in names.items()}
    shares["computed again"] = float(whole[engine.UNDONE]) * trusted
    if exact is not None and waited < 0.999:
        shares["waiting for nodes"] = exact
    counts = {name: float(every[shift + at]) for name, at in _COUNTS.items()}
    counts |= {"seconds": float(total), "steps": float(every[engine.DONE]), "waited": float(every[engine.WAITED])}
    per_run = every[shift + engine.LARGE] / total * asked.days * 86400.0
    hour = float((parts[:, shift + engine.LARGE] > 0).mean()) if portion >= 0.999 else 1.0 - math.exp(-per_run)
    known = parts[:, engine.WAITED] / span if exact is not None else np.zeros(len(parts))
    return Row(
        protection, standbys, int(min(interval, 10**12)), mean, max(0.0, low), min(1.0, high),
        _error(asked, share, known, span, total), paid, shares, float(whole[engine.IDLED]) * asked.gpus_per_node, hour,
        counts, follows(tuple(name for name in protection.names if name not in (CHECKPOINTS, FEWER))),
    )  # fmt: skip


def waits(asked: Scenario, standbys: int) -> float | None:
    """Return the exact share of the time in which a run that needs all nodes waits for one; None: there is no formula.

    Nodes that fail one by one at random moments, standbys included, are away independently of each other, each for a
    share that depends on the means alone. With it, a mean that is simulated needs no long time: it varies far less
    given that nodes are there.
    """
    alone = all(cause.taken <= 1 for cause in asked.causes)
    if not alone or asked.law != "exponential" or asked.idle_failures < 1.0 or asked.bad_spares > 0.0:
        return None
    return waiting(
        asked.nodes, standbys, 1.0, sum(cause.repair_s / cause.mtbf_s for cause in asked.causes if cause.taken)
    )


def waiting(nodes: int, standbys: int, node_mtbf_s: float, repair_s: float) -> float:
    """Return the share of the time in which fewer nodes than needed are whole; all nodes fail and are repaired alike.

    In the stationary birth-and-death chain each node is away independently. The law of the repairs does not matter.
    """
    return float(special.bdtrc(standbys, nodes + standbys, repair_s / (repair_s + node_mtbf_s)))


def _error(asked: Scenario, share: np.ndarray, known: np.ndarray, span: float, total: float) -> float:
    """Return the standard error of a mean of parts, by batches that are long beside a repair.

    Args:
        share: useful share of each part. ``known``: its share of waits, where that is known exactly, else zeros.
        span, total: seconds of a part and of the whole.
    """
    repair = max(cause.repair_s for cause in asked.causes)
    each = min(max(1, math.ceil(10.0 * repair / span)), len(share) // 10)
    batches = len(share) // each
    useful, waited = (values[: batches * each].reshape(batches, each).mean(axis=1) for values in (share, known))
    mean = useful.mean() / max(1.0 - waited.mean(), 1e-9)
    return float((useful - mean * (1.0 - waited)).std(ddof=1)) / math.sqrt(total / (span * each))


_COUNTS = {
    "failures": engine.FAILURES, "swaps": engine.SWAPS, "restarts": engine.RESTARTS, "rebuilds": engine.REBUILDS,
    "losses": engine.LOSSES, "units lost": engine.STACKS,
}  # fmt: skip


def converges(rebuilds: float, stages: int, swapped: bool) -> float:
    """Return the useful share of steps with CheckFree, whose rebuilds raise the loss.

    Args:
        rebuilds: rebuilt stages per step.
        stages: stages of the pipeline.
        swapped: whether the first and the last stage are copied after swap training (CheckFree+).
    """
    ends = min(2, stages) / stages if swapped else 0.0
    excess = JUMP * (1.0 - ends + ends * COPIED) * MADE_GOOD * rebuilds
    if excess >= ABOVE:
        return 0.0
    return (1.0 - excess / ABOVE) ** (1.0 / EXPONENT) / (1.0 + SLOWDOWN * swapped)


def best_interval(save_s: float, between_s: float, step_s: float) -> int:
    """Return the steps between checkpoints with the least time lost, for exponential losses of what was computed.

    It solves (1 - x / M) exp((x + C) / M) = 1, which minimises Daly's exact formula for any restart time.

    Args:
        save_s: C, duration of a checkpoint.
        between_s: M, mean time of computing and saving between two returns to a checkpoint.
        step_s: duration of a step.
    """
    if save_s <= 0 or between_s < step_s:
        return 1
    x = between_s * (1.0 + float(np.real(special.lambertw(-math.exp(-save_s / between_s - 1.0)))))
    return max(1, round(x / step_s)) if x < 1e15 * step_s else 10**15


def daly(compute_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the useful share of the time of a run with checkpoints (Daly 2006, exact for exponential failures).

    Failures strike also during saves, restarts and replay.

    Args:
        compute_s: seconds of computing between two checkpoints.
        save_s, restart_s: durations of a checkpoint and of a restart.
        mtbf_s: mean time between two failures of the run.
    """
    cycle = math.exp(restart_s / mtbf_s) * math.expm1((compute_s + save_s) / mtbf_s)
    return compute_s / (mtbf_s * cycle)


def young(save_s: float, mtbf_s: float) -> float:
    """Return Young's estimate of the best seconds of computing between two checkpoints, sqrt(2 C M)."""
    return math.sqrt(2.0 * save_s * mtbf_s)


def tuned(asked: Scenario, protection: ProtectionChoice, standbys: int, failures: int) -> Row:
    """Simulate with the interval that is asked for, or the best one."""
    if asked.interval:
        return simulate(asked, protection, standbys, asked.interval, failures)
    interval = best_interval(asked.save_time, asked.mtbf_s, asked.step_time)
    row = simulate(asked, protection, standbys, interval, failures)
    for _ in range(2):
        busy = 1.0 - row.shares["stalled"] - row.shares["recovering"] - row.shares["waiting for nodes"]
        between = busy * row.totals["seconds"] / max(row.totals["restarts"], 0.7)
        following = best_interval(asked.save_time, between, asked.step_time)
        if abs(following - interval) <= 0.05 * interval:
            break
        interval = following
        row = simulate(asked, protection, standbys, interval, failures)
    return row


def standbys_to_try(asked: Scenario) -> list[int]:
    """Return numbers of standby nodes: those asked for, or some from 0 to more than are ever in repair."""
    if asked.spares:
        return list(asked.spares)
    away = sum(cause.rate(asked.nodes) * cause.taken * cause.repair_s for cause in asked.causes)
    most = away + 4.0 * math.sqrt(away + 1.0) + max((cause.taken for cause in asked.causes), default=1)
    found = {0, 1, 2, *(math.ceil(away + z * math.sqrt(away)) for z in (-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.7, 3.5))}
    found.add(math.ceil(most))
    return sorted(n for n in found if 0 <= n <= max(2.0, min(most, asked.nodes)))


def best(asked: Scenario, protections: Sequence[ProtectionChoice], search: int = 0) -> Row | None:
    """Return the cheapest row by paid GPU hours per useful hour, simulated with few failures; None if nothing works."""
    search = search or _SEARCH[engine.player()[0]]
    rows = [tuned(asked, one, n, search) for one in _promising(asked, protections, search)
            for n in standbys_to_try(asked)]  # fmt: skip
    return min(rows, key=lambda row: row.paid) if rows else None


def _promising(asked: Scenario, protections: Sequence[ProtectionChoice], search: int) -> list[ProtectionChoice]:
    """Return the three protections that do best with a middling number of standbys."""
    if len(protections) <= 3:
        return list(protections)
    tries = standbys_to_try(asked)
    middle = tries[len(tries) // 2]
    return sorted(protections, key=lambda one: tuned(asked, one, middle, search // 2).paid)[:3]


def final(asked: Scenario, row: Row) -> Row:
    """Simulate a row once more, with so many failures that the mean has a standard error of at most ``_ERROR``."""
    failures = asked.failures or _FINAL[engine.player()[0]]
    found = tuned(asked, row.protection, row.spares, failures)
    if not asked.interval and (asked.law != "exponential" or not row.protection.returns):
        found = simulate(asked, row.protection, row.spares, _searched(asked, found), failures)
    if asked.failures is None and found.error > _ERROR:
        more = min(16.0, (found.error / _ERROR) ** 2)
        found = simulate(asked, row.protection, row.spares, found.interval, round(more * failures))
    return found


def _searched(asked: Scenario, row: Row) -> int:
    """Return the best interval around that of a row, whose formula holds for losses at random moments only.

    With periodic failures, say, the best checkpoint is written right before the next failure, and the useful time over
    the interval is a saw.
    """

    @cache
    def useful(interval: int) -> float:
        return simulate(asked, row.protection, row.spares, interval, _SEARCH[engine.player()[0]]).effective

    def climbed(at: int) -> int:
        for finer, sign in product((1.08, 1.03, 1.01, 1.003), (1, -1)):
            while useful(following := max(1, round(at * finer**sign))) > useful(at):
                at = following
        return at

    begin = sorted({max(1, round(row.interval * 2.0 ** (i / 4))) for i in range(-8, 17)}, key=useful)
    return max(map(climbed, begin[-6:]), key=useful)


def combinations(asked: Scenario) -> list[tuple[str, ...]]:
    """Return the combinations of protections that differ in this model.

    The ladder takes another replica before it rebuilds a stage, so CheckFree adds nothing to replicas here.
    """
    found = [names for names in allowed() if DOUBLE not in names and not (REPLICAS in names and STAGES in names)]
    return [*found, (FEWER,)]


def twice(asked: Scenario, row: Row) -> list[Row]:
    """Return the row with DMR on top, full and sampled, with the settings of the row without it."""
    rows = []
    for share in dict.fromkeys((1.0, asked.dmr_sample)):
        if share > 0.0:
            names = tuple(name for name in (*row.protection.names, DOUBLE) if name != CHECKPOINTS)
            rows.append(replace(row, protection=replace(row.protection, names=names, twice=share)))
    return rows


def table(asked: Scenario, progress: Any = None) -> list[Row]:
    """Return all rows, the cheapest per useful hour first.

    Args:
        asked: the question. If it lists several numbers of standbys, there is a row for each of them.
        progress: called with the number of finished steps, of all steps, and a name.
    """
    rows: list[Row] = []
    every = combinations(asked)
    for number, names in enumerate(every):
        if progress:
            progress(number, len(every), " + ".join(names) or CHECKPOINTS)
        protections = candidates(asked, names)
        listed = [asked.but(spares=(n,)) for n in asked.spares] if len(asked.spares) > 1 else [asked]
        for some, given in product(_apart(protections), listed):
            found = best(given, some)
            if found is not None:
                row = final(given, found)
                rows += [row, *(final(given, each) for each in (twice(asked, row) if FEWER not in names else ()))]
    return sorted(rows, key=lambda row: (row.paid, row.spares, row.protection.title))


def _apart(protections: Sequence[ProtectionChoice]) -> list[list[ProtectionChoice]]:
    """Return lists of the protections that have a row each: lost groups return or not, CheckFree with copies or not."""
    lists: dict[tuple, list[ProtectionChoice]] = {}
    for one in protections:
        lists.setdefault((one.returns, one.copies > 0), []).append(one)
    return list(lists.values())
