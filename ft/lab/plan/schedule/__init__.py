"""Planner for pipeline schedules (``ft plan schedule``): order of microbatches, cost, and validity.

It includes the schedules of CheckFree+ (CheckFree, section 4.3), in which half of the microbatches pass the first two
and the last two stages in swapped order, so that neighbouring stages learn to replace each other.
"""
