"""Simulation of FT-HSDP's protocol under faults: production quorum code, model replicas, and virtual time."""
