"""Effective training time of FT-HSDP: the paper's formula (section 6.1), the same with overlaps, and a simulation."""
