"""Planner for SPARe (``ft plan spare``): failures endured, computing overhead, placement, and optimal redundancy.

In SPARe a step's data is divided into N shard types. Each type is hosted by r of N groups of ranks (r is the
redundancy), and each group computes a stack of the types that it hosts, so that survivors can compute the types of a
lost group. A run restarts from a checkpoint only when all hosts of some type are lost (a wipe-out).
"""
