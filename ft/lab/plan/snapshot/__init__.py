"""Planner for snapshots: memory and bandwidth that peer copies need, and the remaining risk of losing state."""
