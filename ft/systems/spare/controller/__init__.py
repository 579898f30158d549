"""ReCtlr, the reordering controller of SPARe (SPARe, algorithm 2): decides what each group computes after a failure.

The trainer, the planner, the Monte Carlo simulation and the simulator use the same controller.
"""

from ft.systems.spare.controller.controller import Controller, Reordering

__all__ = ["Controller", "Reordering"]
