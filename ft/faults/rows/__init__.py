"""The rows of the table of faults, by what breaks."""
