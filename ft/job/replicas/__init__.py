"""Launcher of ``ft run --ft-hsdp-replicas R``: runs each replica as a run of its own (FT-HSDP, section 4).

The launcher on each node starts one agent (``ft.job.agent``) for each replica that has workers there, and restarts it
when it dies. One launcher of the run keeps the quorum server. A failure inside a replica is left to its agent.
"""
