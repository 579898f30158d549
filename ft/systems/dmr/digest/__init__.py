"""Digests of tensors for DMR: 128-bit hashes of all bits, with the same value from C, from plain torch and from Triton.

DMR compares digests on accelerators, and wherever the first result is not kept until the second execution.
"""

from ft.systems.dmr.digest.api import backend, differing, digest, digest_many, same, writer

__all__ = ["backend", "differing", "digest", "digest_many", "same", "writer"]
