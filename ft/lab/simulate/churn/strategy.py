"""What each strategy does about a lost stage, as numbers that the simulation works with."""

import math
from dataclasses import dataclass, replace

import numpy as np

from ft.lab.interval import daly, in_steps

CHECKPOINT, BEST, REDUNDANT, CHECKFREE, PLUS = STRATEGIES = (
    "checkpoint",
    "checkpoint-best",
    "redundant",
    "checkfree",
    "checkfree-plus",
)
NAMES = {
    CHECKPOINT: "checkpointing",
    BEST: "checkpoints, best interval",
    REDUNDANT: "redundant computation",
    CHECKFREE: "CheckFree",
    PLUS: "CheckFree+",
}
COPY, SAFE = "copy", "safe"
ENDS = (COPY, CHECKPOINT, SAFE)
"""What CheckFree does about its first and last stage: copy the neighbour; fall to the checkpoint; they never fail."""

NEVER = 10**12
"""Iterations between checkpoints where there are none."""


@dataclass(frozen=True)
class Costs:
    """What is asked. Times in seconds.

    Attributes:
        stages: that can fail, each with transformer blocks; the embedding's are not among them. iteration_s: plain.
        interval: iterations between the persistent checkpoints of checkpointing. fallback: of the other strategies; 0:
            they have none, for two adjacent stages are never lost at once (the paper's assumption, section 3).
        save_s, load_s: what the run waits for a save, and for reading it back. recovery_s: until a new node stands in
            for a lost stage.
        redundant_overhead: of an iteration. redundant_pause_s: until the neighbour stands in for a lost stage.
        jump: of the loss when a stage is rebuilt from two neighbours. ends_jump: when the first or the last is a copy
            that was not trained in its place. swapped_jump: when it was (CheckFree+). ends: one of :data:`ENDS`.
        slowdown: CheckFree+ needs so many more iterations without failures. bubbles, swapped_bubbles: idle share of an
            iteration, and of one whose schedule swaps stages.
    """

    stages: int
    iteration_s: float
    interval: int
    fallback: int
    save_s: float
    load_s: float
    recovery_s: float
    redundant_overhead: float
    redundant_pause_s: float
    jump: float
    ends_jump: float
    swapped_jump: float
    ends: str
    slowdown: float
    bubbles: float
    swapped_bubbles: float


@dataclass(frozen=True)
class Strategy:
    """One way to train on through lost stages.

    Attributes:
        key: of :data:`STRATEGIES`. iteration_s: with its share of a save. interval: iterations between checkpoints.
        stall_s: all wait after a failure. recovery_s: within it a neighbour's failure leaves nothing to rebuild from.
        load_s: more, where all go back to a checkpoint.
        jumps: of the loss by stage that is lost, float [stages]. falls: a loss of that stage is the checkpoint's
            business, bool [stages]. spared: that stage never fails, bool [stages].
        slowdown: so many more iterations to each loss.
    """

    key: str
    iteration_s: float
    interval: int
    stall_s: float
    recovery_s: float
    load_s: float
    jumps: np.ndarray
    falls: np.ndarray
    spared: np.ndarray
    slowdown: float = 0.0


def best_interval(costs: Costs, between_s: float) -> int:
    """Iterations between checkpoints by Daly (2006). ``between_s``: mean time between two failures anywhere."""
    if math.isinf(between_s):
        return NEVER
    return in_steps(daly(costs.save_s, between_s), costs.iteration_s)


def strategy(key: str, costs: Costs, between_s: float = math.inf) -> Strategy:
    """The strategy of that name, of :data:`STRATEGIES`. ``between_s``: for the best interval; infinite: no failures."""
    if key == BEST:
        return replace(strategy(CHECKPOINT, replace(costs, interval=best_interval(costs, between_s))), key=key)
    none, no_stage = np.zeros(costs.stages), np.zeros(costs.stages, dtype=bool)
    ends = no_stage.copy()
    ends[[0, -1]] = True
    after = (costs.recovery_s, costs.recovery_s, costs.load_s)
    if key == CHECKPOINT:
        paced = costs.iteration_s + costs.save_s / costs.interval
        return Strategy(key, paced, costs.interval, *after, none, ~no_stage, no_stage)
    interval, share_s = NEVER, 0.0
    if costs.fallback:
        interval, share_s = costs.fallback, costs.save_s / costs.fallback
    else:
        after = (costs.recovery_s, 0.0, 0.0)
    if key == REDUNDANT:
        paced = costs.iteration_s * (1.0 + costs.redundant_overhead) + share_s
        return Strategy(key, paced, interval, costs.redundant_pause_s, *after[1:], none, no_stage, no_stage)
    if key == CHECKFREE:
        jumps = np.where(ends, costs.ends_jump, costs.jump)
        falls, spared = ends & (costs.ends == CHECKPOINT), ends & (costs.ends == SAFE)
        return Strategy(key, costs.iteration_s + share_s, interval, *after, jumps, falls, spared)
    paced = costs.iteration_s * (1.0 - costs.bubbles) / (1.0 - costs.swapped_bubbles) + share_s
    jumps = np.where(ends, costs.swapped_jump, costs.jump)
    return Strategy(key, paced, interval, *after, jumps, no_stage, no_stage, costs.slowdown)
