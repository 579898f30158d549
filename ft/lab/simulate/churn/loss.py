"""Convergence model: a power law without failures, plus an excess loss that decays after each rebuilt stage."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Convergence:
    """Validation loss after n iterations without failures: floor + above (n / iterations) ** -exponent.

    Attributes:
        floor: the loss that no number of iterations goes below.
        above: the target loss minus the floor.
        exponent: exponent of the power law, greater than 0.
        iterations: iterations to the target without failures.
        made_good: iterations in which the excess after a rebuild decays to 1/e.
        evaluate: iterations between evaluations of the loss; training can end only at an evaluation.
    """

    floor: float
    above: float
    exponent: float
    iterations: int
    made_good: float
    evaluate: int

    @property
    def target(self) -> float:
        """The validation loss at which training ends."""
        return self.floor + self.above

    def loss(self, n: np.ndarray) -> np.ndarray:
        """Return the loss after ``n`` iterations without excess, in the shape of ``n``; infinite at 0."""
        with np.errstate(divide="ignore"):
            return self.floor + self.above * (np.asarray(n, dtype=float) / self.iterations) ** -self.exponent

    def kept(self, n: np.ndarray) -> np.ndarray:
        """Return the fraction of an excess that is left after ``n`` more iterations."""
        return np.exp(-np.asarray(n, dtype=float) / self.made_good)
