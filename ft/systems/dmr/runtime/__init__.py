"""DMR at run time (dual modular redundancy, SpareTrain): execute each operator of a training iteration a second time,
immediately or later as the strategy decides, compare the results, and repeat the iteration if they differ.
"""
