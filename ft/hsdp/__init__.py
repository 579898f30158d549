"""FT-HSDP: replicas of a model that train together, and go on without one that is lost (paper, sections 4 to 6)."""
