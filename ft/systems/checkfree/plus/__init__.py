"""CheckFree+: recovery of the first and the last pipeline stage without checkpoints (CheckFree, section 4.3).

Half of the microbatches pass through the first two and the last two stages in swapped order. The two stages of a pair
thereby learn to do each other's work, so that a lost one can be rebuilt as a copy of the other. Embedding and output
layer are replicated on both stages of their pair.
"""
