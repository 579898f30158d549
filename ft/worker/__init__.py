"""A worker's part in a run: its session with its agent, the orders it receives, and the reports it sends."""
