"""Quorums at scale (FT-HSDP, section 5): the real server and clients, driven by any number of logical ranks."""
