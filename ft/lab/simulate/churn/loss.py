"""Convergence model of ``ft simulate churn``: a power law without failures, plus an excess loss.

The excess is the increase of the loss when a lost pipeline stage is rebuilt; it decays exponentially afterwards.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Convergence:
    """Parameters of the validation loss.

    After n iterations without failures it is floor + above (n / iterations) ** -exponent.

    Attributes:
        floor: limit of the loss for infinitely many iterations.
        above: target loss minus the floor.
        exponent: exponent of the power law, greater than 0.
        iterations: number of iterations to the target loss without failures.
        made_good: number of iterations in which the excess after a rebuild decays to 1/e.
        evaluate: number of iterations between evaluations of the loss; training can end only at an evaluation.
    """

    floor: float
    above: float
    exponent: float
    iterations: int
    made_good: float
    evaluate: int

    @property
    def target(self) -> float:
        """Return the validation loss at which training ends."""
        return self.floor + self.above

    def loss(self, n: np.ndarray) -> np.ndarray:
        """Return the loss after ``n`` iterations without excess, in the shape of ``n``; infinite at 0."""
        with np.errstate(divide="ignore"):
            return self.floor + self.above * (np.asarray(n, dtype=float) / self.iterations) ** -self.exponent

    def kept(self, n: np.ndarray) -> np.ndarray:
        """Return the fraction of an excess that is left after ``n`` more iterations."""
        return np.exp(-np.asarray(n, dtype=float) / self.made_good)
