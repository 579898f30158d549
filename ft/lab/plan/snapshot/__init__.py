"""Planner for snapshots (``ft plan snapshot``): memory and bandwidth that peer copies need, and the remaining risk.

The risk is the probability that a failure destroys a state together with all its copies.
"""

MAIN, MOMENTS = 4, {"adam": 8, "sgd": 4, "lion": 4, "muon": 4, "dist_muon": 4, "adaptive_muon": 8, "soap": 8}
"""Bytes per parameter: MAIN for the fp32 main copy, MOMENTS for the fp32 tensors of each optimizer."""
