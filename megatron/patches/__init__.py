"""Run-time patches of megatron-core and torch, and the detection of the platform (CUDA or CPU) that they depend on.

A patch replaces one symbol (a function, method, class or constant) of megatron-core, called "core" in this folder, or
of torch. `apply()` is called once per process, after torch is imported and before any model code. The records of the
patches (`manifest.Patch`) have every symbol that `apply()` may replace, and the reason; `python -m megatron.patches`
prints them.
"""

from __future__ import annotations

import importlib
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
        """Return the device for tensors: the CUDA device that this process has selected, or the CPU."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.name == "cuda" else torch.device("cpu")

    def offers(self, package: str) -> bool:
        """Return whether there is a GPU and ``package`` (GPU kernels, such as ``apex``) is installed."""
        return self.name == "cuda" and importlib.util.find_spec(package) is not None

    def imports(self, package: str) -> bool:
        """Return whether there is a GPU and ``package`` can be imported.

        An extension that was built against another torch is installed, but importing it fails. megatron-core tries the
        import, and counts such an extension as missing.
        """
        if not self.offers(package):
            return False
        try:
            importlib.import_module(package)
        except ImportError:
            return False
        return True

    def select_device(self, local_rank: int) -> None:
        """Select the CUDA device for this process by its local rank.

        Raises:
            ft.base.errors.UserError: there are fewer GPUs than processes on this node.
        """
        if self.name != "cuda":
            return
        import torch

        from ft.state import device

        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}",
                "start as many processes per node as it has GPUs",
            )
        device.select(local_rank)

    def synchronize(self) -> None:
        """Wait until the device has finished all work that this process has started."""
        if self.name == "cuda":
            import torch

            torch.cuda.synchronize()

    def choose_backend(self, asked_for: str | None) -> str:
        """Return the communication backend: the user's choice, or the platform's default.

        Raises:
            ft.base.errors.UserError: the user chose NCCL, and there is no GPU.
        """
        if asked_for == "nccl" and self.name != "cuda":
            raise UserError(
                "--distributed-backend nccl needs GPUs, and there is none here",
                "remove --distributed-backend, or use gloo",
            )
        return asked_for or self.backend


def choose_platform(cuda_is_available: bool) -> Platform:
    """Return the platform of a machine with or without a usable CUDA device."""
    return Platform("cuda", "nccl") if cuda_is_available else Platform("cpu", "gloo")


@cache
def platform() -> Platform:
    """Return the platform of this process. All other code calls this function to find out whether there is a GPU."""
    import torch

    return choose_platform(torch.cuda.is_available())


def apply(*features: str) -> list[Patch]:
    """Apply every patch that this platform and ``features`` need, each at most once per process.

    Args:
        features: names of the features of this run, keys of ``manifest.MODULES`` such as ``WITH_REPLICAS``.

    Returns:
        the patches for this platform and ``features``, including those that an earlier call has applied.

    Raises:
        ft.base.errors.UserError: the installed megatron-core lacks a symbol, or its signature is not the one that
            the patch expects; nothing has been replaced then.
    """
    from megatron.patches import registry

    return registry.apply(registry.due(platform().name, features))
