"""Planner for SPARe (``ft plan spare``): failures endured, computing overhead, placement, and optimal redundancy."""
