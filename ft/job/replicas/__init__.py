"""``ft run --ft-hsdp-replicas R``: each replica a run of its own (paper, section 4), and what holds them together.

A launcher on each node starts one agent (``ft.job.agent``) for each replica that has workers there, and again when it
dies; one launcher of the run keeps the quorum server. A failure inside a replica is its agent's business alone.
"""
