"""Simulation of the control plane's production code in a model cluster: virtual time, models of agents and workers."""
