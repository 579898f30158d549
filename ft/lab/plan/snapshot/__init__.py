"""Planner for snapshots (``ft plan snapshot``): memory and bandwidth that peer copies need, and the remaining risk.

A snapshot is a copy of one rank's training state in host memory. Peer copies of it are held by other ranks (DEADPOOL).
The risk is the probability that a failure destroys a state together with all its copies.
"""
