"""Logging of a run: ``runlog`` writes it, ``quiet`` silences dependencies."""
