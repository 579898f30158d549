"""Launcher of ``ft run --ft-hsdp-replicas R``: runs each replica as a run of its own (FT-HSDP, section 4).

The launcher on each node starts one agent for each replica that has workers there, and restarts an agent that dies. One
launcher of the run also runs the quorum server. A failure inside a replica is handled by the replica's agent.
"""
