"""Self-test for DMR: find the operators of a training step that are not reproducible bit for bit on this machine.

DMR (dual modular redundancy, from the SpareTrain paper) executes each operator twice and compares the results in order
to detect silent data corruption. An operator that is not reproducible would raise false alarms.
"""
