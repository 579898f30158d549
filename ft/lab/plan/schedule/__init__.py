"""Planner for pipeline schedules (``ft plan schedule``): order of microbatches, cost, and validity."""
