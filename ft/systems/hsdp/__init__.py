"""FT-HSDP: replicas (full copies of the model on their own ranks) fail as a unit, and the others continue to train.

The quorum of a step is the set of replicas that take part in it: healthy members contribute gradients, and members that
are behind fetch the state of a healthy one. A replica that returns is behind at first. The number of the quorum in
which a step was committed is the lineage of the state after that step. Gradients are exchanged in a ring, between those
ranks of all replicas that have the same number.
"""
