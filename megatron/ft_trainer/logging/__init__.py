"""Logging of a run: ``runlog`` writes it, the other modules compute values, ``quiet`` silences dependencies."""
