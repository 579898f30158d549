"""The control plane's production code in a simulated cluster: virtual time, agents and workers that are models of ours."""
