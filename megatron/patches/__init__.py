"""The changes that this project makes inside megatron-core and torch, and the platform (CUDA or CPU) they depend on.

`apply()` is called once per process, after torch is imported and before any model code. The manifest names every symbol
that it may replace, why, and the core versions that it was checked on; `python -m megatron.patches` prints it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ft.base.errors import UserError

if TYPE_CHECKING:
    import torch

    from megatron.patches.manifest import Patch

__all__ = ["Platform", "apply", "choose_platform", "platform"]


@dataclass(frozen=True)
class Platform:
    """The hardware of this process: `name` is "cuda" or "cpu", `backend` its torch.distributed backend."""

    name: str
    backend: str

    @property
    def device(self) -> torch.device:
        """The device to put tensors on: the CUDA device that this process has selected, or the CPU."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.name == "cuda" else torch.device("cpu")

    def offers(self, package: str) -> bool:
        """Return whether an optional package of GPU kernels (``transformer_engine``, ``apex``) can be used."""
        return self.name == "cuda" and importlib.util.find_spec(package) is not None

    def select_device(self, local_rank: int) -> None:
        """Select the CUDA device for this process by its local rank.

        Raises:
            ft.base.errors.UserError: there are fewer GPUs than processes on this node.
        """
        if self.name != "cuda":
            return
        import torch

        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}",
                "start as many processes per node as it has GPUs",
            )
        torch.cuda.set_device(local_rank)

    def choose_backend(self, asked_for: str | None) -> str:
        """Return the communication backend: the user's choice, or the platform's default.

        Raises:
            ft.base.errors.UserError: the user chose NCCL, and there is no GPU.
        """
        if asked_for == "nccl" and self.name != "cuda":
            raise UserError("--distributed-backend nccl needs GPUs, and there is none here", "drop it or use gloo")
        return asked_for or self.backend


def choose_platform(cuda_is_available: bool) -> Platform:
    """Return the platform of a machine with or without a usable CUDA device."""
    return Platform("cuda", "nccl") if cuda_is_available else Platform("cpu", "gloo")


@cache
def platform() -> Platform:
    """Return the platform of this process. All code learns from here whether there is a GPU."""
    import torch

    return choose_platform(torch.cuda.is_available())


def apply(*features: str) -> list[Patch]:
    """Apply every patch that this platform and ``features`` need, each at most once per process.

    Args:
        features: values of the manifest's ``when``, such as ``WITH_REPLICAS``.

    Returns:
        the manifest's entries that are in force afterwards; the same list for every call.

    Raises:
        ft.base.errors.UserError: the installed megatron-core lacks a symbol, or its signature is not the one in the
            manifest; nothing has been replaced then.
    """
    from megatron.patches import registry

    return registry.apply(registry.due(platform().name, frozenset(features)))
