"""Pipeline schedules: orders of units, played through, given batches of messages, and checked before they may run."""
