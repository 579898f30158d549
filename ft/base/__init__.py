"""Basic types and helpers that all packages of ``ft`` use: errors, events, quantities, flags, the run's secret token.

This package imports no other package of ``ft``.
"""
