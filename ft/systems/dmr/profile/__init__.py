"""The DMR profiler: record the operators of a training iteration, their durations, idle times and memory use.

DMR (dual modular redundancy, SpareTrain) executes operators a second time. The planner (``ft.systems.dmr.plan``) reads
the profile and decides when.
"""
