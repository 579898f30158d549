"""Digests of tensors: 128 bits that differ where one bit differs; equal from C, from plain torch and from Triton."""

from ft.dmr.digest.api import backend, digest, digest_many
from ft.dmr.digest.comparison import compare, differing

__all__ = ["backend", "compare", "differing", "digest", "digest_many"]
