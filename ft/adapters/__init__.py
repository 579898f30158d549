"""Adapters: each protects a training program of others, unmodified, through the contract of ``ft.protection``."""
