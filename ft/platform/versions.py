"""The versions that must be equal on all nodes of a run: Python, the packages that compute, and this project's code."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

from ft.base.checkout import CHECKOUT

_OURS = ("ft", "megatron/ft_trainer", "megatron/patches")
_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine")


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that is installed, and the digest of this project's code."""
    found = {"python": platform.python_version(), "code of ft and megatron": CODE}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for folder in _OURS:
        for file in sorted((CHECKOUT / folder).rglob("*.py")):
            digest.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


CODE = _digest_of_code()
"""Digest of the sources at the time of import. Workers inherit it from the process that they are forked from."""
