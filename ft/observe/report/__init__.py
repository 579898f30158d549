"""Reports on the folder of one run: its recoveries, goodput, timeline and current status."""
