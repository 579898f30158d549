"""FT-HSDP's protocol in simulated runs: the production decision and client, model replicas, virtual time, faults."""
