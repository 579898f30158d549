"""Predict which process groups a hot-swap rebuilds at any number of ranks, and how long this takes.

A hot-swap replaces lost ranks by standby processes without a restart of the others; process groups whose members have
changed are rebuilt. For ``ft simulate recovery``, megatron-core lays out the process groups, the production planner
decides which of them to rebuild, and measurements on a few ranks are extrapolated.
"""
