"""Diagnosis of runs that should be equal: the first step, parameter and rank that differ, and the deviating run."""
