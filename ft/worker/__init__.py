"""A worker's place in a run: its session with its agent, the orders it gets, and what it reports."""
