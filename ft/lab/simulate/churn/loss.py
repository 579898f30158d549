"""How training converges: a power law without failures, and an excess above it after each rebuilt stage."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Convergence:
    """Validation loss after n iterations: floor + above (n / iterations) ** -exponent, without failures.

    Attributes:
        floor: what no number of iterations goes below. above: how far above it the target is.
        exponent: of the power law, greater than 0. iterations: to the target without failures.
        made_good: iterations in which the excess after a rebuild shrinks to 1/e of itself.
        evaluate: the loss is measured at every so many iterations; the target is reached at a measurement.
    """

    floor: float
    above: float
    exponent: float
    iterations: int
    made_good: float
    evaluate: int

    @property
    def target(self) -> float:
        """The validation loss that ends the training."""
        return self.floor + self.above

    def loss(self, n: np.ndarray) -> np.ndarray:
        """After ``n`` iterations, without excess; shape of ``n``. Infinite at 0."""
        with np.errstate(divide="ignore"):
            return self.floor + self.above * (np.asarray(n, dtype=float) / self.iterations) ** -self.exponent

    def kept(self, n: np.ndarray) -> np.ndarray:
        """Share of an excess that is left after ``n`` more iterations."""
        return np.exp(-np.asarray(n, dtype=float) / self.made_good)
