"""The rows of the table of faults, grouped by the component that breaks."""
