"""The control plane's production code in a simulated cluster: virtual time, models of agents and workers."""
