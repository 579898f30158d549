"""Pipeline schedules: orders of units, their simulation, the batches of messages between stages, and validity
checks."""
