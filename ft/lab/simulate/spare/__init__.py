"""Step-level simulation of long training runs under failures: SPARe, replication, and checkpointing alone."""
