"""Estimate the cost of DMR without hardware (``ft dmr estimate``), from analytic costs of a model on a cluster.

DMR (dual modular redundancy, from the SpareTrain paper) executes each operator twice and compares the results in order
to detect silent data corruption. The estimate replaces the profile of a real training iteration by a computed one.
"""
