"""FT-HSDP: replicas (full copies of the model) fail as a unit; the others train on, and a returning one catches up."""
