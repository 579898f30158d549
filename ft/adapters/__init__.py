"""Adapters: each adds fault tolerance to an unmodified third-party training program, through the interface
``ft.protection``.
"""
