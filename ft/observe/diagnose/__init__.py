"""Diagnosis of runs: where several runs of the same training come apart, and whose fault that is."""
