"""Basic types and helpers that every package uses: errors, events, quantities, flags, the run's token.

Imports nothing of ft.
"""
