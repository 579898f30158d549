"""ReCtlr, the reordering controller (algorithm 2): one object for planner, Monte Carlo, simulation and trainer."""

from ft.systems.spare.controller.controller import Controller, Reordering

__all__ = ["Controller", "Reordering"]
