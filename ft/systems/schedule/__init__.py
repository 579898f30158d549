"""Pipeline schedules: orders of units, their simulation, batches of messages between stages, validity checks."""
