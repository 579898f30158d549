"""Observation of runs: reports, live status, and diagnosis of runs that differ."""
