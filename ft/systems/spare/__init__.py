"""SPARe: fault-tolerant data parallelism by redundancy. Several replicas of the model (groups) can compute each part
(shard type) of a global batch, and when groups are lost, the survivors reorder what they compute.
"""
