"""Effective training time of FT-HSDP: the formula of FT-HSDP, section 6.1, a closed form with overlapping failures, and
a simulation.
"""
