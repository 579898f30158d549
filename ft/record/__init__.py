"""Read the folder of a run: its event, metric and status files, what they lack, and its recoveries."""
