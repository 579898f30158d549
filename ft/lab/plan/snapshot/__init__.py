"""What snapshots and peer copies ask of a cluster, and what risk is left, before a run is started."""
