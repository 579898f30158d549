"""The folder of a run, read back: its records, what they lack, and its recoveries."""
