"""Simulations: the production decision code under faults that no test cluster lives long enough to meet."""
