"""Simulation of the training time of a pipeline that loses whole stages again and again (``ft simulate churn``).

It compares the strategies of CheckFree, table 2: checkpointing, redundant computation, CheckFree and CheckFree+.
CheckFree rebuilds a lost pipeline stage from its two neighbours, which raises the loss for a while. CheckFree+ can also
rebuild the first and the last stage, because it swaps the order of stages for half of the microbatches (swap training).
"""
