"""``ft plan schedule``: the order in which pipeline stages run microbatches, its cost, and whether it may run."""
