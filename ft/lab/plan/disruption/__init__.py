"""What failures cost a run: the paper's section IV, for restarts from a checkpoint and for hot-swap."""
