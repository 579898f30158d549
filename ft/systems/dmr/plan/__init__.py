"""The DMR planner (SpareTrain): decide for each operator of a training iteration how and when it is verified.

The planner reads a profile of the iteration and writes a plan file, which the run then follows.
"""
