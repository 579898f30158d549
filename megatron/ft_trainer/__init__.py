"""This project's trainer: the code between a launch script and ``megatron.core``."""
