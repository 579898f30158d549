"""The DMR planner (SpareTrain): decide for each operator of a training iteration how and when it is verified.

DMR (dual modular redundancy) verifies an operator by executing it a second time and comparing the results. The planner
reads a profile of the iteration and writes a plan file, which the run then follows.
"""
