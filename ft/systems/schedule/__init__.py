"""Pipeline schedules for CheckFree+: orders of forwards and backwards, their simulation, messages between the stages,
and validity checks.
"""
