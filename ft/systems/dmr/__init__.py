"""DMR (dual modular redundancy, SpareTrain): execute every operator twice and compare the results to catch silent data
corruption. The second executions are placed in time in which the device would otherwise be idle."""
