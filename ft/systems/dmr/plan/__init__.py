"""The DMR planner: assign to each operator of a trace, in three phases, how and when it is verified at run time."""
