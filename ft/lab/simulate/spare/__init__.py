"""Step-level simulation of long training under failures: SPARe, replication, and checkpoints alone."""
