"""Which operators of a training step are not reproducible on this machine: what DMR would raise false alarms about."""
