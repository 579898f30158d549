"""Redo tables of the papers with the model behind ``ft plan buy``, with the deviation of every figure.

    python tools/experiments/papers.py deadpool
    python tools/experiments/papers.py ft-hsdp
    python tools/experiments/papers.py checkfree
    python tools/experiments/papers.py spare --trials 300

deadpool: section IV. ft-hsdp: section 6.1 (44 and 80 %). checkfree: table 2; predicted and fitted cells are told apart.
spare: tables 2, 4, 5 and 6, in the scenario of table 1. SpareTrain's are in ``dmr_figures.py``.
"""

import argparse
import itertools
import math
import statistics
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

import closed_forms as exact  # noqa: E402

from ft.lab.plan.goodput import model  # noqa: E402
from ft.lab.plan.goodput.model import CHECKPOINTS, ProtectionChoice  # noqa: E402
from ft.protection.table import HOT_SWAP, REPLICAS, STAGES, SWAPPED  # noqa: E402
from ft.show.text import percent, table  # noqa: E402
from ft.systems.spare.placement import Placement  # noqa: E402
from ft.systems.spare.ruler import ruler  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=_PAPERS, help="the paper")
    parser.add_argument("--trials", type=int, default=300, help="spare: trials of each row (default: 300)")
    given = parser.parse_args(argv)
    print("\n\n".join(_PAPERS[given.name](given)))
    return 0


def _beside(ours: float, paper: float) -> tuple[str, str, str]:
    """Return a share, that of the paper, and the difference."""
    return percent(ours), percent(paper), f"{100 * (ours - paper):+.1f} points"


def deadpool(given: argparse.Namespace) -> list[str]:
    """Return section IV's example: a failure in 18 min, a restart of 10 min, checkpoints every 100 steps of 20 s."""
    del given
    rate = "--gpus 96 --gpu-mtbf 28.8h --step-time 20s --save-time 0 --restart-time 10m --repair-time 0 --swap-time 40s"
    restart = exact.deadpool(1080, 600 + 50 * 20)
    swap = exact.deadpool(1080, 40 + 10)
    alone = model.simulate(exact.asked(rate), ProtectionChoice((CHECKPOINTS,)), 0, 100, 40_000).effective
    pair = model.simulate(exact.asked(rate), ProtectionChoice((HOT_SWAP,), copies=1), 8, 100, 40_000).effective
    rows = [
        ("restart and replay of K/2 steps (16.7 min)", *_beside(alone, restart)),
        ("hot-swap in 40 s, half a step again", *_beside(pair, swap)),
    ]
    head = ("protection", "simulated", "formula of section IV", "difference")
    why = (
        "The formula counts no failure during restarts and replay, and a loss of K/2 steps; with a failure every 18\n"
        "min the run seldom gets as far as a checkpoint, which takes 33 min of computing."
    )
    return [table(head, rows, right=(1, 2, 3)), why]


def ft_hsdp(given: argparse.Namespace) -> list[str]:
    """Return the effective training time of section 6.1."""
    del given
    words = "--gpus 96 --gpu-mtbf 28.8h --step-time 10ms --save-time 0 --restart-time 10m --repair-time 0"
    rows = []
    for law in ("periodic", "exponential"):
        asked = exact.asked(f"{words} --law {law}")
        for units, paper in ((1, 0.44), (12, 0.80)):
            made = ProtectionChoice((CHECKPOINTS,)) if units == 1 else ProtectionChoice((REPLICAS,), units)
            found = model.simulate(asked, made, 0, 1 if units == 1 else 1e12, 40_000).effective
            formula = exact.ft_hsdp(1080, units, 600 if units == 1 else 180, 600)
            if law != "periodic":
                formula = exact.overlapping(1080, units, 180, 600) if units > 1 else math.exp(-600 / 1080)
            name = "all restart" if units == 1 else "12 replicas, a stall of 3 min"
            rows.append((f"{name}, {law} failures", percent(formula), *_beside(found, paper)))
    return [
        table(("protection", "formula", "simulated", "paper", "difference"), rows, right=(1, 2, 3, 4)),
        "The paper lets one failure in every interval of 18 min be over before the next. Failures at random times\n"
        "overlap, and some strike during restarts.",
    ]


_CHECKFREE = {
    "checkpoints, every 100": ((CHECKPOINTS,), (558.2, 621.7, 634.4), 100),
    "checkpoints, best interval": ((CHECKPOINTS,), (math.nan,) * 3, None),
    "CheckFree": ((HOT_SWAP, STAGES), (367.8, 405.9, 563.0), 10**9),
    "CheckFree+": ((HOT_SWAP, STAGES, SWAPPED), (355.1, 367.8, 460.6), 10**9),
}
_RATES, _FITTED = (0.05, 0.10, 0.16), 0.10


def checkfree_hours(name: str, rate: float, failures: int = 60_000) -> float:
    """Return the hours of a cell of CheckFree's table 2: 10,000 iterations of 91.3 s on 6 stages.

    Args:
        name: key of the strategy.
        rate: probability that a stage fails within an hour.
        failures: number of failures to simulate.
    """
    names, _, interval = _CHECKFREE[name]
    mtbf, days = -1.0 / math.log1p(-rate), 10_000 * 91.3 / 86400
    asked = exact.asked(
        f"--gpus 6 --gpus-per-node 1 --node-mtbf {mtbf}h --step-time 91.3s --days {days} --stages 6 --save-time 10s "
        "--restart-time 90s --neighbour-time 0 --repair-time 0"
    )
    if STAGES not in names:
        made = ProtectionChoice(names)
        row = model.simulate(asked, made, 0, interval, failures) if interval else model.tuned(asked, made, 0, failures)
        return 24.0 * row.days(asked)
    # Two stages beside each other are never lost at once here, so that rebuilds take no time, and the 30 s of each are
    # added. CheckFree copies the ends, too, at the cost of a whole jump: the authors' code does.
    row = model.simulate(asked, ProtectionChoice((HOT_SWAP, STAGES, SWAPPED)), 6, 10**9, failures)
    rebuilds = row.totals["rebuilds"] / row.totals["steps"]
    converges = model.converges(rebuilds, 6, SWAPPED in names) / model.converges(rebuilds, 6, True)
    return 24.0 * row.days(asked) / converges / (1.0 - 30.0 / asked.mtbf_s)


def checkfree(given: argparse.Namespace) -> list[str]:
    """Return the training hours of table 2."""
    del given
    rows = []
    for rate, name in itertools.product(_RATES, _CHECKFREE):
        paper = _CHECKFREE[name][1][_RATES.index(rate)]
        ours = checkfree_hours(name, rate)
        kind = "fitted" if rate == _FITTED and STAGES in _CHECKFREE[name][0] else "predicted"
        beside = ("-", "-", "") if math.isnan(paper) else (f"{paper:.1f} h", f"{ours / paper:.2f}", kind)
        rows.append((f"{100 * rate:.0f} %", name, f"{ours:.1f} h", *beside))
    return [
        table(("an hour", "strategy", "ours", "paper", "ours / paper", ""), rows, right=(2, 3, 4)),
        f"Fitted: the jump of the loss when a stage is rebuilt ({model.JUMP}, which shrinks to 1/e in "
        f"{model.MADE_GOOD:g} steps),\nand the additional steps of CheckFree+ ({100 * model.SLOWDOWN:.1f} %), each to "
        "its cell at 10 %. Agreement of these two cells shows nothing.",
        "Checkpoints at the best interval, which the paper does not have, beat CheckFree at all its rates: a save\n"
        "takes 10 s here, a tenth of an iteration, and a failure then costs a few iterations, while each rebuild\n"
        "raises the loss.",
    ]


SPARE_MTBF, SPARE_RESTART, SPARE_SAVE, SPARE_STACK, SPARE_STEPS = 300.0, 3600.0, 60.0, 64.0, 10_000
"""SPARe's table 1: seconds between failures, of a restart, of a checkpoint and of a stack; steps of the training."""
_SPARE_SHAPE, _SPARE_JITTER = 0.78, 0.05
_TABLE_2 = {200: ((3, 6.07, 0.617), (9, 2.92, 0.870)), 600: ((3, 4.27, 0.799), (8, 2.49, 0.939)),
            1000: ((3, 3.88, 0.844), (9, 2.34, 0.965))}  # fmt: skip
"""Groups -> (degree, time to train, availability) of the best replication, and the same of the best SPARe."""


def spare_training(groups: int, redundancy: int, is_spare: bool, seed: int) -> tuple[float, float]:
    """Simulate the training of SPARe's section 5 step by step; return its time and availability.

    Each group has a clock of Weibull-distributed failures. Lost groups stay away until a global restart, in which
    clocks run on, and a group that fails again restarts again: the published figures need that. Stacks and patch
    computes are the controller's means for the number of lost groups; wipe-outs are those of the placement.

    Args:
        groups: number of groups.
        redundancy: hosts of each shard type, or the degree of replication.
        is_spare: whether SPARe, or replication.
        seed: of all random numbers.

    Returns:
        (time to train relative to a training without failures, share of the time outside of restarts).
    """
    rng, scale = np.random.default_rng(seed), groups * SPARE_MTBF / math.gamma(1 + 1 / _SPARE_SHAPE)
    reduce_s = groups / 100
    if is_spare:
        hosts = Placement(groups, ruler(groups, redundancy)).host_table
        stack, patch = model.controlled(groups, redundancy)
        lasts = exact.mu(groups, redundancy) * SPARE_MTBF
    else:
        hosts = np.minimum(np.arange(groups)[:, None] // redundancy * redundancy + np.arange(redundancy), groups - 1)
        stack, patch = np.full(groups + 1, float(redundancy)), np.zeros(groups + 1)
        lasts = exact.endurance(groups, redundancy) * SPARE_MTBF
    period = exact.checkpoint_period(SPARE_SAVE, lasts, SPARE_RESTART)
    due, now, done, restarting = scale * rng.weibull(_SPARE_SHAPE, groups), 0.0, 0, 0.0
    slowest = _largest(groups)
    while done < SPARE_STEPS and now < 50 * SPARE_STEPS * SPARE_STACK:
        order = np.argsort(due)
        place = np.empty(groups, dtype=np.int64)
        place[order] = np.arange(groups)
        fatal, times = int(place[hosts].max(axis=1).min()), due[order]
        lost, since, saved_at = 0, 0, now
        while done + since < SPARE_STEPS:
            now += SPARE_STACK * (stack[lost] + _SPARE_JITTER * slowest * math.sqrt(stack[lost])) + reduce_s
            before = lost
            while lost <= fatal and times[lost] <= now - reduce_s / 2:
                now += (reduce_s / 2 + 0.2) if lost == before else 0.0
                lost += 1
            if lost > fatal:
                break
            if lost > before and rng.random() > np.prod(1.0 - patch[before:lost]):
                now += SPARE_STACK * (1 + _SPARE_JITTER * slowest)
            since += 1
            if now - saved_at >= period - SPARE_SAVE:
                now, done, since = now + SPARE_SAVE, done + since, 0
                saved_at = now
        if lost <= fatal:
            done += since
            break
        begun = now
        now = _restart(now, due, order[:lost], scale, rng)
        restarting += now - begun
    if done == 0:
        return math.inf, 0.0
    base = SPARE_STEPS * (SPARE_STACK + reduce_s)
    return now / base * SPARE_STEPS / done, 1.0 - restarting / now


def _largest(count: int) -> float:
    """Return the mean of the largest of ``count`` numbers drawn from N(0, 1)."""
    from scipy.special import ndtri

    return float(ndtri(0.5264 ** (1.0 / count)))


def _restart(now: float, due: np.ndarray, lost: np.ndarray, scale: float, rng: np.random.Generator) -> float:
    """Restart all groups, renew the clocks of those that were lost, before or during it; return the time of its end."""
    ready = now + SPARE_RESTART * (1 + _SPARE_JITTER * rng.standard_normal(len(due)))
    due[lost] = ready[lost] + scale * rng.weibull(_SPARE_SHAPE, len(lost))
    again = np.flatnonzero(due <= ready)
    ready[again] = due[again] + SPARE_RESTART * (1 + _SPARE_JITTER * rng.standard_normal(len(again)))
    due[again] = ready[again] + scale * rng.weibull(_SPARE_SHAPE, len(again))
    return float(ready.max())


def spare(given: argparse.Namespace) -> list[str]:
    """Return table 2 (time to train) and tables 4, 5 and 6 (failures endured and stacks)."""
    rows = []
    for groups, published in _TABLE_2.items():
        for is_spare, (redundancy, paper, available) in zip((False, True), published, strict=True):
            runs = [spare_training(groups, redundancy, is_spare, seed) for seed in range(3)]
            time, up = (statistics.fmean(values) for values in zip(*runs, strict=True))
            name = f"SPARe, r = {redundancy}" if is_spare else f"replication, degree {redundancy}"
            rows.append(
                (str(groups), name, f"{time:.2f}", f"{paper:.2f}", f"{time / paper:.2f}", *_beside(up, available))
            )
    head = ("groups", "scheme", "time to train", "paper", "ours / paper", "available", "paper", "difference")
    second = table(head, rows, right=(0, *range(2, 8)))
    lines, failures, stacks, same = [], [], [], 0
    for groups, redundancy, *printed in exact.spare_tables():
        endured, stack, _ = exact.trials(Placement(groups, ruler(groups, redundancy)), given.trials, 1).T
        endured, stack = endured.mean(), (stack / endured).mean()
        formulas = f"{exact.mu(groups, redundancy):.1f}", f"{exact.stack_lower_bound(groups, redundancy):.2f}"
        same += formulas == (printed[0], printed[2])
        failures.append(abs(endured / float(printed[1]) - 1))
        stacks.append(abs(stack - float(printed[3])))
        simulated = f"{endured:.1f}", f"{stack:.2f}"
        lines.append((str(groups), str(redundancy), formulas[0], printed[0], simulated[0], printed[1], formulas[1],
                      printed[2], simulated[1], printed[3]))  # fmt: skip
    head = ("N", "r", "failures (3)", "paper", "trials", "paper", "stack (6)", "paper", "trials", "paper")
    said = (
        f"Tables 4 to 6: {same} of {len(lines)} rows of the formulas are those of the paper to the printed digit;\n"
        f"trials ({given.trials} of each row) differ from the paper's by {percent(statistics.fmean(failures))} in "
        f"failures and {statistics.fmean(stacks):.3f} in stacks, on average."
    )
    return [f"Table 2, in the scenario of table 1:\n\n{second}", f"{said}\n\n{table(head, lines, right=range(10))}"]


_PAPERS = {"deadpool": deadpool, "ft-hsdp": ft_hsdp, "spare": spare, "checkfree": checkfree}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
