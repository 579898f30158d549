"""CheckFree+: half of the microbatches take the first two and the last two stages in the other order.

So neighbours learn each other's work; embedding and head are kept twice (paper, section 4.3).
"""
