"""The fork's trainer: what stands between a launch script and ``megatron.core``."""
