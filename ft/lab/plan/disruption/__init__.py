"""Planner for the cost of failures (``ft plan disruption``): restarts from a checkpoint compared with hot-swap.

In a hot-swap a standby (a warm, idle node) takes over from a failed node, with state from peers' memory. The formulas
are those of DEADPOOL, section IV.
"""
