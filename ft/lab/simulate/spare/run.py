"""Simulation of one training run with SPARe, replication or checkpoints alone, step by step.

A group is one data-parallel rank, which fails as a whole. In a stack, every group computes one of its data shards; a
step computes one or more stacks and then all-reduces the gradients. After a loss, gradients that are missing are
computed again (patch compute). If a type of shard has no group left, all groups restart from the last checkpoint
(global restart). A scheme (:class:`ft.lab.simulate.spare.schemes.Scheme`) decides how many stacks a step has and what a
loss requires.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from scipy import special

from ft.lab.simulate.spare.clocks import Clocks, Law
from ft.lab.simulate.spare.restart import SEMANTICS
from ft.lab.simulate.spare.schemes import Scheme

JITTERED = ("stack", "step")
"""Units of computation that get one random factor each, see ``Job.jitter_per``."""
_BATCH = 4096
"""Number of random values that are drawn at a time."""


@dataclass(frozen=True)
class Job:
    """The simulated job. Times are in seconds.

    Attributes:
        groups: number of groups, N in SPARe.
        steps: number of training steps.
        stack_s: compute time of one stack.
        all_reduce_s: duration of an all-reduce; a failed all-reduce costs half of it.
        restart_s: restart time of a group.
        save_s: duration of a checkpoint.
        shrink_s: cost of shrinking the communicator, for each failed all-reduce.
        controller_s: cost of SPARe's controller, for each failed all-reduce.
        jitter: standard deviation of the random factor with mean 1 by which each duration is multiplied; a barrier
            waits for the slowest group.
        jitter_per: "stack": one factor for each stack that a group computes; "step": one for all stacks of a step.
        restart: semantics of a global restart, a key of :data:`ft.lab.simulate.spare.restart.SEMANTICS`.
        limit: multiple of the duration without failures after which the run is given up.
    """

    groups: int
    steps: int
    stack_s: float
    all_reduce_s: float
    restart_s: float
    save_s: float
    shrink_s: float = 0.1
    controller_s: float = 0.1
    jitter: float = 0.05
    jitter_per: str = "stack"
    restart: str = "extend"
    limit: float = 50.0

    @property
    def base_s(self) -> float:
        """Duration of the training in seconds without failures, jitter and redundancy (T_0 in SPARe)."""
        return self.steps * (self.stack_s + self.all_reduce_s)


@dataclass
class RunTotals:
    """The totals of a run that both simulations count, this one and that with SimGrid.

    Attributes:
        total_s: total time in seconds.
        steps: number of steps that no restart discarded.
        attempts: number of steps begun.
        stacks: number of stacks computed, patch computes included.
        failures: number of groups lost.
        losses: number of all-reduces that failed because groups were lost.
        patches: number of patch computes.
        restarts: number of global restarts.
    """

    total_s: float = 0.0
    steps: int = 0
    attempts: int = 0
    stacks: int = 0
    failures: int = 0
    losses: int = 0
    patches: int = 0
    restarts: int = 0


@dataclass
class Result(RunTotals):
    """The totals of a run, and the parts of its time, in seconds. The fields below add up to ``total_s``.

    Attributes:
        useful_s: time of the steps that no restart discarded.
        rework_s: time of the steps that a restart discarded, including the interrupted step.
        restart_s: time of global restarts.
        shrink_s: time of shrinking the communicator.
        controller_s: time of SPARe's controller.
        save_s: time of writing checkpoints.
    """

    useful_s: float = 0.0
    rework_s: float = 0.0
    restart_s: float = 0.0
    shrink_s: float = 0.0
    controller_s: float = 0.0
    save_s: float = 0.0

    @property
    def up_fraction(self) -> float:
        """Return the fraction of the time not spent in restarts and shrinking: the availability in SPARe, table 2."""
        return 1.0 - (self.restart_s + self.shrink_s) / self.total_s

    @property
    def availability(self) -> float:
        """Fraction of the time spent in steps that no restart discarded: the availability of SPARe, formula (2)."""
        return self.useful_s / self.total_s

    @property
    def stacks_per_step(self) -> float:
        """Mean number of stacks computed in a step: the computation overhead of the scheme."""
        return self.stacks / self.attempts


class Jitter:
    """Draws random durations from normal distributions.

    Args:
        spread: standard deviation relative to the mean.
        per: one of :data:`JITTERED`, the unit with one random factor.
        rng: random generator of this run.
    """

    def __init__(self, spread: float, per: str, rng: np.random.Generator):
        self._spread, self._rng = spread, rng
        self._power = 0.5 if per == "stack" else 1.0
        self._normals, self._exponentials = self._draw(rng.standard_normal), self._draw(rng.standard_exponential)

    @staticmethod
    def _draw(source) -> Iterator[float]:
        while True:
            yield from source(_BATCH).tolist()

    def one(self, seconds: float) -> float:
        """Return the duration of one event with the mean ``seconds``."""
        return max(0.0, seconds * (1.0 + self._spread * next(self._normals)))

    def slowest(self, seconds: float, stacks: int, groups: int) -> float:
        """Return the compute time in seconds of the slowest group.

        A group's compute time is normally distributed, so the maximum is drawn as the normal quantile of U^(1/groups)
        with a uniform random number U.

        Args:
            seconds: mean duration of one stack.
            stacks: number of stacks that each group computes.
            groups: number of groups.
        """
        tail = -math.expm1(-next(self._exponentials) / groups)
        slowest = -float(special.ndtri(tail))
        return max(0.0, seconds * (stacks + self._spread * stacks**self._power * slowest))

    def each(self, seconds: float, groups: int) -> np.ndarray:
        """Return the durations of ``groups`` events with the mean ``seconds``, float [groups]."""
        return np.maximum(0.0, seconds * (1.0 + self._spread * self._rng.standard_normal(groups)))


def run(job: Job, scheme: Scheme, law: Law, period_s: float, seed: int) -> Result:
    """Simulate a training run until its last step, or until it is given up (``job.limit``).

    Args:
        job: the job.
        scheme: the fault-tolerance scheme; it must be in its initial state.
        law: distribution of the failures.
        period_s: seconds from the end of a checkpoint to the end of the next (SPARe, formula (1)).
        seed: seed of the run; failures and jitter have separate random streams.
    """
    clock_rng, jitter_rng = (np.random.default_rng([seed, stream]) for stream in range(2))
    return _Run(job, scheme, Clocks(law, job.groups, clock_rng), Jitter(job.jitter, job.jitter_per, jitter_rng)).go(
        period_s
    )


class _Run:
    def __init__(self, job: Job, scheme: Scheme, clocks: Clocks, jitter: Jitter):
        self._job, self._scheme, self._clocks, self._jitter = job, scheme, clocks, jitter
        self._now, self._left = 0.0, job.groups
        self._unsaved_s, self._unsaved = 0.0, 0
        self._found = Result()

    def go(self, period_s: float) -> Result:
        job, found = self._job, self._found
        give_up, saved_at = job.limit * job.base_s, 0.0
        while found.steps + self._unsaved < job.steps and self._now < give_up:
            if not self._step():
                self._restart()
                saved_at = self._now
            elif self._now - saved_at >= period_s - job.save_s:
                self._keep()
                self._spend("save_s", self._jitter.one(job.save_s))
                saved_at = self._now
        self._keep()
        found.total_s = self._now
        return found

    def _step(self) -> bool:
        """Simulate one step. Return False if a shard type has no group left, which requires a global restart."""
        job, scheme, jitter, found = self._job, self._scheme, self._jitter, self._found
        began, aside = self._now, found.shrink_s + found.controller_s
        found.attempts += 1
        self._compute(scheme.stack)
        reduce = jitter.one(job.all_reduce_s)
        kept = True
        # A group that fails in the second half has already sent its part: the next all-reduce detects its loss.
        while kept and self._clocks.next <= self._now + reduce / 2:
            self._now += reduce / 2
            kept = self._lose(self._clocks.failed(self._now))
            reduce = jitter.one(job.all_reduce_s)
        if kept:
            self._now += reduce
            self._unsaved += 1
            scheme.committed()
        spent = self._now - began - (found.shrink_s + found.controller_s - aside)
        if kept:
            self._unsaved_s += spent
        else:
            found.rework_s += spent
        return kept

    def _lose(self, groups: list[int]) -> bool:
        """Handle the loss of groups. Return False if a shard type has no group left."""
        job, found = self._job, self._found
        found.failures += len(groups)
        found.losses += 1
        self._left -= len(groups)
        wiped, patch = self._scheme.lose(groups)
        if self._scheme.reorders:
            self._spend("controller_s", self._jitter.one(job.controller_s))
        if wiped:
            return False
        if patch:
            found.patches += 1
            self._compute(patch)
        self._spend("shrink_s", self._jitter.one(job.shrink_s))
        return True

    def _compute(self, stacks: int) -> None:
        self._now += self._jitter.slowest(self._job.stack_s, stacks, self._left)
        self._found.stacks += stacks

    def _restart(self) -> None:
        job, found = self._job, self._found
        found.rework_s += self._unsaved_s
        self._unsaved_s, self._unsaved = 0.0, 0
        end = SEMANTICS[job.restart](self._now, self._clocks, lambda groups: self._jitter.each(job.restart_s, groups))
        self._spend("restart_s", end - self._now)
        found.restarts += 1
        self._left = job.groups
        self._scheme.reset()

    def _keep(self) -> None:
        """Count the steps since the last checkpoint as kept."""
        self._found.steps += self._unsaved
        self._found.useful_s += self._unsaved_s
        self._unsaved_s, self._unsaved = 0.0, 0

    def _spend(self, part: str, seconds: float) -> None:
        """Let time pass, and add it to the field ``part`` of the result."""
        setattr(self._found, part, getattr(self._found, part) + seconds)
        self._now += seconds


PARTS = tuple(field.name for field in fields(Result) if field.name.endswith("_s") and field.name != "total_s")
"""Names of the fields that add up to ``total_s``."""
