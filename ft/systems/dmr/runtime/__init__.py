"""DMR at run time: execute each operator of a training iteration a second time, as the strategy decides, and
compare."""
