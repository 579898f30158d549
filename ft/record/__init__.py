"""Read the folder of a run: its events, metrics and status, gaps in these files, and its recoveries from failures."""
