"""Estimate the cost of DMR without hardware (``ft dmr estimate``), from analytic costs of a model on a cluster.

The estimate replaces the profile of a real training iteration by a computed one.
"""
