"""Profiles: what a run executes in one iteration, how long it takes, which windows it has, and what memory it uses."""
