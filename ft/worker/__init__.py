"""The library that a worker of ``ft run`` uses to take part in the run and its recoveries."""
