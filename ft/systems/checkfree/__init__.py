"""CheckFree and CheckFree+: rebuild a pipeline stage that was lost on all data-parallel ranks from its neighbour
stages."""
