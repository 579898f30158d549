"""FT-HSDP: data-parallel replicas are the unit of failure; the others train on, and a returning replica catches up."""
