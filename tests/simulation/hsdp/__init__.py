"""Simulation of FT-HSDP's protocol under random faults, in virtual time.

In FT-HSDP, several replicas train copies of one model and all-reduce their gradients before each optimizer step. The
quorum server's dispatch and decisions and its client (``ft.job.quorum``) and the protocol of the replicas
(``ft.systems.hsdp.protocol``) are those of production; network, clock, checkpoint and training are models. Terms used
in this package:

- A replica is a full copy of the model with its own ranks. A life is one set of the replica's worker processes; after a
  failure the agent, the replica's supervisor, builds the next life. Rank 0 of a life is the leader.
- A quorum is the set of replicas that execute the next step together. The quorum server forms it from the leaders'
  reports. Its healthy members hold the newest state; members that are behind fetch this state and contribute zeros.
- The lineage of a state is the number of the quorum that committed the last step of this state.
- A ring is an all-reduce of gradients between the ranks with the same index in the members of a quorum.
- A history is one simulated run.
"""
