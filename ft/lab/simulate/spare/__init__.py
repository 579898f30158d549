"""Step-level simulation of long data-parallel training runs under failures: SPARe, replication, checkpoints alone.

Terms of SPARe, section 3, used in this package:

- A group is one data-parallel rank, which may consist of many GPUs and fails as a whole. There are N groups.
- In each step the batch is divided into N shards, called shard types. With redundancy r, each group holds r types.
- In a stack, every group computes one of its shards. A step computes only as many stacks as are needed to have the
  gradients of all types, and then all-reduces the gradients.
- After a loss, the controller reorders the shards of the groups that are left. If gradients of the current step are
  missing, they are computed again (patch compute). If a type has no group left (wipe-out), all groups restart from the
  last checkpoint (global restart).
"""
