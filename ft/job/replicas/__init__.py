"""Launcher of ``ft run --ft-hsdp-replicas R``: runs each replica as a run of its own (FT-HSDP, section 4).

A replica is a full copy of the model with its own world of ranks. The launcher on each node starts one agent
(``ft.job.agent``, the supervisor of workers) for each replica that has workers there, and restarts an agent that dies.
One launcher of the run also runs the quorum server, which decides the members of each step. A failure inside a replica
is handled by the replica's agent.
"""
