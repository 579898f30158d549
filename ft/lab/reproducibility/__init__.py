"""Self-test for DMR: find the operators of a training step that are not reproducible bit for bit on this machine.

An operator that is not reproducible would raise false alarms.
"""
