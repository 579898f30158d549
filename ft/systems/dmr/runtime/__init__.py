"""DMR at run time: execute each operator of an iteration a second time, as the strategy decides, and compare."""
