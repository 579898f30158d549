"""CheckFree+: half of the microbatches take the first two and the last two stages in the other order (CheckFree,
section 4.3).

Neighbours thereby learn each other's work, so that an end stage can be rebuilt as a copy. Embedding and head are
replicated.
"""
