"""What a run's folder tells: recoveries, goodput, timeline, status."""
