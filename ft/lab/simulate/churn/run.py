"""Discrete-event simulation of pipeline training under stage failures, for one strategy of ``ft simulate churn``.

Time is virtual, and all seeds are simulated at once with vectorized operations. Between two events, a run executes
iterations at a constant pace, and its excess loss, the increase of the loss by rebuilt stages, decays. Events are:

- The failure of a stage. The run stalls during the recovery. Then either the stage is rebuilt and the excess loss
  increases by a jump, or all stages roll back to the last checkpoint. A rollback happens if the strategy demands it,
  and whenever an adjacent stage is still being recovered, because then there is nothing to rebuild the lost stage from.
  The interrupted iteration counts once, as in CheckFree: training continues with its batch.
- An evaluation of the loss, which ends the run at the target.

Progress is continuous: a failure may strike anywhere within an iteration, and only checkpoints and evaluations happen
at whole numbers of iterations.
"""

from dataclasses import dataclass

import numpy as np

from ft.lab.simulate.churn.failures import Failures
from ft.lab.simulate.churn.loss import Convergence
from ft.lab.simulate.churn.strategy import Strategy


@dataclass(frozen=True)
class Outcome:
    """The results of all seeds, as arrays of shape [seeds].

    Attributes:
        hours: hours to the target loss, infinite where the run was given up.
        executed: number of iterations executed, repeated ones included.
        failures: number of failures of stages that can fail.
        falls: number of rollbacks to a checkpoint.
        undone: number of iterations lost in rollbacks.
        history: (hours, loss) of the first seed before and after each event; empty unless requested.
    """

    hours: np.ndarray
    executed: np.ndarray
    failures: np.ndarray
    falls: np.ndarray
    undone: np.ndarray
    history: list[tuple[float, float]]


def run(how: Strategy, law: Convergence, failures: Failures, limit_s: float, seeds: int, told: bool = False) -> Outcome:
    """Simulate training until the target loss.

    Args:
        how: parameters of the recovery strategy.
        law: convergence model.
        failures: failures of each seed.
        limit_s: virtual time in seconds after which a run is given up.
        seeds: number of runs for which ``failures`` has failures.
        told: whether to record the loss curve of the first seed.
    """
    runs = _Runs(how, law, failures, seeds)
    history: list[tuple[float, float]] = []
    while runs.under_way.any():
        before = runs.at[0] if told else 0.0
        runs.advance(limit_s)
        if told and (runs.at[0] > before or not history):
            history.append(runs.first())
        runs.lose_stages(limit_s)
        if told and runs.struck[0]:
            history.append(runs.first())
        runs.end(limit_s)
    hours = np.where(runs.reached, runs.at / 3600.0, np.inf)
    return Outcome(hours, runs.executed, runs.failed, runs.fell, runs.undone, history)


class _Runs:
    """The state of all runs, as arrays of shape [seeds] unless stated otherwise.

    Attributes:
        at: virtual time in seconds up to which the run is simulated; after a failure, the end of the stall.
        n: number of iterations done, a fraction within an iteration.
        excess: excess of the loss over the power law.
        next: time in seconds of the next failure, which is entry ``place`` of ``times`` and ``stages``, both
            [seeds, n].
        measures: whether the current event is an evaluation.
        struck: whether the current event is a failure.
        under_way: whether the run has neither reached the target nor been given up.
        saved: excess of the loss at the last checkpoint.
        last: time in seconds of each stage's last failure, [seeds, stages + 2], padded with a column at either end.
    """

    def __init__(self, how: Strategy, law: Convergence, failures: Failures, seeds: int):
        self.how, self.law, self.failures = how, law, failures
        self.rows = np.arange(seeds)
        self.at, self.n, self.excess, self.saved = (np.zeros(seeds) for _ in range(4))
        self.executed, self.undone = np.zeros(seeds), np.zeros(seeds)
        self.failed, self.fell = np.zeros(seeds, dtype=int), np.zeros(seeds, dtype=int)
        self.under_way = np.ones(seeds, dtype=bool)
        self.reached, self.struck, self.measures = np.zeros((3, seeds), dtype=bool)
        self.last = np.full((seeds, len(how.jumps) + 2), -np.inf)
        self.times, self.stages = failures.more()
        self.place, self.next = np.zeros(seeds, dtype=int), np.zeros(seeds)
        # The loss cannot reach the target before this iteration, because an excess is never negative.
        self.earliest = np.ceil(law.iterations * (1.0 + how.slowdown) / law.evaluate - 1e-9) * law.evaluate

    def first(self) -> tuple[float, float]:
        """Return the hours and the loss of the first seed."""
        loss = self.law.loss(self.n[:1] / (1.0 + self.how.slowdown))[0] + self.excess[0]
        return self.at[0] / 3600.0, float(loss)

    def advance(self, limit_s: float) -> None:
        """Advance each run to its next failure, its next evaluation, or the limit, whichever is first."""
        how, law = self.how, self.law
        self.next = self.times[self.rows, self.place]
        due = np.maximum((np.floor(self.n / law.evaluate) + 1.0) * law.evaluate, self.earliest)
        measured_at = self.at + (due - self.n) * how.iteration_s
        self.measures = self.under_way & (measured_at <= np.minimum(self.next, limit_s))
        until = np.where(self.measures, measured_at, np.minimum(self.next, limit_s))
        until = np.where(self.under_way, np.maximum(self.at, until), self.at)
        n = np.where(self.measures, due, self.n + (until - self.at) / how.iteration_s)
        checkpoint = np.floor(n / how.interval) * how.interval
        passed = checkpoint > np.floor(self.n / how.interval) * how.interval
        self.saved = np.where(passed, self.excess * law.kept(np.maximum(checkpoint - self.n, 0.0)), self.saved)
        self.excess = self.excess * law.kept(n - self.n)
        self.executed += n - self.n
        self.n, self.at = n, until

    def lose_stages(self, limit_s: float) -> None:
        """Apply the next failure in each run that has reached its time."""
        how = self.how
        self.struck = self.under_way & ~self.measures & (self.next <= limit_s)
        stage = self.stages[self.rows, self.place]
        strikes = self.struck & ~how.spared[stage]
        waiting = (self.next[:, None] - self.last[self.rows[:, None], stage[:, None] + [0, 1, 2]]) < how.recovery_s
        falls = strikes & (how.falls[stage] | waiting[:, 0] | waiting[:, 2])
        # A stage that is lost again during its recovery is rebuilt only once, later.
        jumps = strikes & ~falls & ~waiting[:, 1]
        self.excess = np.where(jumps, self.excess + how.jumps[stage], np.where(falls, self.saved, self.excess))
        checkpoint = np.floor(self.n / how.interval) * how.interval
        self.undone += np.where(falls, self.n - checkpoint, 0.0)
        self.n = np.where(falls, checkpoint, self.n)
        stall = np.where(falls, how.recovery_s + how.load_s, how.stall_s)
        self.at = np.where(strikes, np.maximum(self.at, self.next + stall), self.at)
        self.last[self.rows[strikes], stage[strikes] + 1] = self.next[strikes]
        self.failed += strikes
        self.fell += falls
        self.place += self.struck
        if self.place.max() == self.times.shape[1]:
            self._more()

    def _more(self) -> None:
        times, stages = self.failures.more()
        self.times, self.stages = np.hstack([self.times, times]), np.hstack([self.stages, stages])

    def end(self, limit_s: float) -> None:
        """End the runs whose evaluation shows the target loss, and give up the runs at the time limit."""
        loss = self.law.loss(self.n / (1.0 + self.how.slowdown)) + self.excess
        # The tolerance keeps a negligible rest of an old jump from delaying the end to the next evaluation.
        self.reached |= self.measures & (loss <= self.law.target * (1.0 + 1e-9))
        self.under_way &= ~self.reached & (self.at < limit_s)
