"""What this project changes inside megatron-core and torch, and the platform that decides it.

`apply()` is called once per process, after torch is imported and before any model code. The manifest names every
symbol it may replace, why, and the core versions it was checked on; `python -m megatron.patches` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron.patches.manifest import Patch

__all__ = ["Platform", "apply", "choose_platform", "platform"]


@dataclass(frozen=True)
class Platform:
    """Where this process computes: `name` is "cuda" or "cpu", `backend` its torch.distributed backend."""

    name: str
    backend: str

    @property
    def device(self) -> torch.device:
        """The device to put tensors on: the CUDA device this process has selected, or the CPU."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.name == "cuda" else torch.device("cpu")


def choose_platform(cuda_is_available: bool) -> Platform:
    """The platform of a machine that has, or has not, a usable CUDA device."""
    return Platform("cuda", "nccl") if cuda_is_available else Platform("cpu", "gloo")


@cache
def platform() -> Platform:
    """The platform of this process. The only place that asks torch whether there is a GPU."""
    import torch

    return choose_platform(torch.cuda.is_available())


def apply() -> list[Patch]:
    """Apply every patch that this platform needs, each at most once per process.

    Returns:
        the manifest's entries that are in force afterwards, the same list however often it is called.

    Raises:
        ft.errors.UserError: the installed megatron-core lacks a symbol, or has it with another signature, than
            the manifest says; nothing has been replaced then.
    """
    from megatron.patches import registry

    return registry.apply(registry.due(platform().name))
