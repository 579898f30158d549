"""The recovery strategies that ``ft simulate churn`` compares, as parameters of the simulation.

CheckFree rebuilds a lost pipeline stage from its two neighbours, which increases the loss by a jump. CheckFree+ swaps
the order of stages for half of the microbatches (swap training), so that the first and last stage can be rebuilt by
copying a neighbour. With redundant computation, a neighbour holds a copy of each stage and takes over.
"""

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
"""How CheckFree treats the loss of the first or last stage: copy the neighbour, roll back to the checkpoint, or assume
that these stages never fail.
"""

NEVER = 10**12
"""Value of an interval between checkpoints, in iterations, if there are no checkpoints."""


@dataclass(frozen=True)
class Costs:
    """The costs of the simulated job. Times are in seconds.

    Attributes:
        stages: number of stages that can fail, each with transformer blocks; the embedding's stages are not included.
        iteration_s: duration of an iteration without checkpoints and redundancy.
        interval: number of iterations between the persistent checkpoints of the checkpointing strategy.
        fallback: number of iterations between the checkpoints of the other strategies; 0: they have no checkpoints,
            because two adjacent stages are never lost at once (the assumption of CheckFree, section 3).
        save_s: time that the run waits for a checkpoint to be written.
        load_s: time that the run waits for a checkpoint to be loaded.
        recovery_s: time until a new node replaces the node of a lost stage.
        redundant_overhead: overhead of redundant computation, as a fraction of an iteration.
        redundant_pause_s: time until the neighbour takes over a lost stage, with redundant computation.
        jump: increase of the loss when a stage is rebuilt from two neighbours.
        ends_jump: increase of the loss when the first or last stage is copied from its neighbour without swap training.
        swapped_jump: increase of the loss when the first or last stage is copied after swap training (CheckFree+).
        ends: treatment of the first and last stage by CheckFree, one of :data:`ENDS`.
        slowdown: fraction of additional iterations that CheckFree+ needs without failures.
        bubbles: idle fraction of an iteration.
        swapped_bubbles: idle fraction of an iteration with swap training.
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
    """The simulation parameters of one strategy.

    Attributes:
        key: one of :data:`STRATEGIES`.
        iteration_s: duration of an iteration in seconds, including its share of a checkpoint.
        interval: number of iterations between checkpoints.
        stall_s: seconds that all stages wait after a failure.
        recovery_s: seconds after a failure in which a failure of an adjacent stage causes a rollback.
        load_s: seconds that a rollback to a checkpoint takes in addition.
        jumps: increase of the loss when each stage is lost and rebuilt, float [stages].
        falls: whether the failure of each stage causes a rollback, bool [stages].
        spared: whether each stage never fails, bool [stages].
        slowdown: fraction of additional iterations until a given loss is reached.
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
    """Return the best number of iterations between checkpoints, by Daly's formula (2006).

    Args:
        costs: costs of the job.
        between_s: mean seconds between two failures of any stage.
    """
    if math.isinf(between_s):
        return NEVER
    return in_steps(daly(costs.save_s, between_s), costs.iteration_s)


def strategy(key: str, costs: Costs, between_s: float = math.inf) -> Strategy:
    """Return the parameters of a strategy.

    Args:
        key: one of :data:`STRATEGIES`.
        costs: costs of the job.
        between_s: mean seconds between failures, for the best checkpoint interval; infinite if there are no failures.
    """
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
