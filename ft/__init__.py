"""Fault tolerance for Megatron: five systems on one fault path."""

__version__ = "0.1.0"
