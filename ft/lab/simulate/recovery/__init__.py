"""Predict what a recovery rebuilds at any number of ranks, and how long that takes.

megatron-core lays out the process groups, the production planner decides which of them to rebuild, and measurements on
a few ranks are extrapolated.
"""
