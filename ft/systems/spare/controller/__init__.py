"""ReCtlr, the reordering controller (SPARe, algorithm 2), which planner, Monte Carlo, simulation and trainer share."""

from ft.systems.spare.controller.controller import Controller, Reordering

__all__ = ["Controller", "Reordering"]
