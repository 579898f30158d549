"""Latency of FT-HSDP's quorum at scale (FT-HSDP, section 5): the real server and clients, with any number of ranks."""
