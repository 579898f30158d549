"""Effective training time of FT-HSDP on a cluster with failures (``ft simulate hsdp``).

In FT-HSDP several replicas train copies of one model; when one fails, the others continue. The time is computed in
three ways: by the formula of FT-HSDP, section 6.1, by a closed form with overlapping failures, and by simulation.
"""
