"""CheckFree and CheckFree+: rebuild a pipeline stage that is lost on all replicas from its neighbour stages."""
