"""Logging of a run: ``runlog`` writes it, ``figures`` computes values, ``quiet`` silences dependencies."""
