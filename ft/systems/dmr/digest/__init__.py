"""Digests of tensors: 128 bits that differ where one bit differs; equal from C, from plain torch and from Triton."""

from ft.systems.dmr.digest.api import backend, digest, digest_many, writer
from ft.systems.dmr.digest.comparison import compare, differing, same

__all__ = ["backend", "compare", "differing", "digest", "digest_many", "same", "writer"]
