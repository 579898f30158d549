"""Saves and loads the trainer's checkpoints in megatron-core's sharded format, with checksums and atomic commits.

``checkpointer`` contains the interface for the training loop; ``inventory`` describes what a checkpoint folder holds.
"""
