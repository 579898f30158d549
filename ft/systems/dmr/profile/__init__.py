"""The DMR profiler: record the operators of a training iteration, their durations, idle times and memory use.

The planner (``ft.systems.dmr.plan``) reads the profile and decides when each operator is verified.
"""
