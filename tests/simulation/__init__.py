"""Production protocols in simulated clusters, in virtual time and under faults that are drawn from a seed.

    python -m tests.simulation control --seeds 10000 --jobs 2
    python -m tests.simulation hsdp --plant all
    python -m tests.simulation hangs --cases 2000

``control`` has the control plane and the workers' protocol, ``hsdp`` FT-HSDP's replicas and quorum server; ``hangs``
asks whether ``ft diagnose hang`` names the cause.
"""
